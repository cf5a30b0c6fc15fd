"""Overrides (``key=value``): their parts, their faults, and what to type instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from launcher.base.errors import LEFT_OUT, AsTyped, Fault, as_override, did_you_mean, nearest
from launcher.config.load import option_types
from launcher.contract.config import LaunchConfig
from launcher.typed.read import REST, Source, field_types, join
from launcher.typed.scalars import scalar

_KEY = re.compile(r"[A-Za-z_][\w-]*([./][\w-]+)*(@[\w.-]+(:[\w.-]+)?)?", re.ASCII)
_CALL = re.compile(r"\w+\(.*\)", re.DOTALL)
_ESCAPED_QUOTE = re.compile(r"\\['\"]")
_SPECIAL = "=#()$;@&|<>!*?"
_PAIRS = {"[": "]", "{": "}"}
MAX_DEPTH = 20
"""No setting is nested deeper than this."""
EXPANDED = ("site.setup", "site.node_env", "site.scratch")
"""Settings in which the shell of a node expands variables."""
LAYER = 1_000_000
"""Overrides take precedence over every file."""
_REASONS = {
    "index out of range": ("the list has fewer items", "Its indices start at 0; or give the whole list."),
    r"an int$|for int\(\)": ("an index of a list is a number", "Indices start at 0; or give the whole list."),
    "list indices must be": ("an item of a list cannot be deleted", "Give the whole list."),
    "Cannot merge": ("a list cannot replace a group of settings, nor a group a list", "Leave it out."),
    "looks like a config group": ("there is no group of this name", "Leave out what follows the @."),
    "recursion": ("is nested too deeply", "Give a flatter value."),
}
"""Patterns of Hydra's and Python's messages: the rule that each means, and the fix."""
_SWEEP = re.compile(r"(choice|range|interval|glob|shuffle|sort)\(.*\)", re.DOTALL)


class PlainText(str):
    """An unquoted scalar of an override as it was written, escapes undone."""


def typed(value: Any, path: str, source: Source, marks: dict[str, Source]) -> Any:
    """A value parsed from an override, its plain texts typed as in YAML; records the source of each part."""
    is_plain = isinstance(value, PlainText) and "${" not in value
    marks[path] = replace(source, text=str(value) if is_plain else None)
    if isinstance(value, list):
        return [typed(item, f"{path}[{index}]", source, marks) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: typed(item, join(path, key), source, marks) for key, item in value.items()}
    if isinstance(value, PlainText):
        return scalar(str(value)) if is_plain else str(value)
    return value


def split(word: str) -> tuple[str, str]:
    """Config path and value of an override, without its ``+`` or ``~``.

    >>> split("++parallel.tp=4"), split("~x")
    (('parallel.tp', '4'), ('x', ''))
    """
    path, _, value = word.lstrip("+~").partition("=")
    return path, value


def word_fault(word: str) -> Fault | None:
    """The fault of an override that is wrong before any parsing, whether it has one value or is a sweep."""
    path, value = split(word)
    if word.startswith("\\"):
        rule = "starts with a backslash, as when a line continuation is pasted"
        return retyped(path, value, rule, word.lstrip("\\").partition("=")[0], value)
    if not path:
        rule = "an override is written key=value"
        fix = f"Give KEY={shlex.quote(value) if value else 'VALUE'}."
        return Fault("(nothing)", value or "(nothing)", rule, fix)
    if fault := _key_fault(word, path, value):
        return fault
    if "=" not in word and not word.startswith("~"):
        return Fault(path, "(nothing)", "an override is written key=value", f"Give {path}=VALUE.")
    if "=" in word and not value:
        can_be_none = _takes(path, NoneType)
        fix = f"Give {path}=VALUE{f', or {path}=null for no value' if can_be_none else ''}."
        ways = ({path: None},) if can_be_none else ()
        return Fault(path, "(nothing)", "has no value after the =", fix, ways=ways)
    if value.startswith("="):
        return retyped(path, value, "a value does not begin with =", path, value[1:])
    if "oc.env" in value:
        return secret_fault(path, value)
    if _depth(value) > MAX_DEPTH:
        return Fault(path, value, f"is nested more than {MAX_DEPTH} deep", "Give a flatter value.")
    return None


def retyped(path: str, value: str, rule: str, key: str, meant: str, where: str = "") -> Fault:
    """The fault of an override that means another one, ``key=meant``."""
    way = ({path: LEFT_OUT} if key != path else {}) | {key: AsTyped(meant)}
    return Fault(path, value, rule, f"Give {as_override(key, AsTyped(meant))}.", where, ways=(way,))


def _key_fault(word: str, path: str, value: str) -> Fault | None:
    if _KEY.fullmatch(path):
        return None
    key, colon, rest = path.partition(":")
    if colon and _KEY.fullmatch(key):
        if not rest or "=" not in word:  # `key:=value`, `key: value`
            rule = "has a colon in place of =" if rest else "has a stray colon before the ="
            return retyped(path, value or "(nothing)", rule, key, (rest or value).strip())
        if _KEY.fullmatch(nested := f"{key}.{rest}"):
            return retyped(path, value, "the parts of a key are joined by dots", nested, value)
    rule = "is not a valid key: letters, digits and _, joined by dots"
    near = re.sub(r"\[(\d+)\]", r".\1", path).strip(" ./")
    if _KEY.fullmatch(near):
        return retyped(path, value or "(nothing)", rule, near, value.strip())
    return Fault(path, value or "(nothing)", rule)


def _takes(path: str, kind: type) -> bool:
    """Whether a setting may be of a type; an option, of any plugin that its group could name."""
    found: Any = LaunchConfig
    for name in re.split(r"[./]", path):
        items = getattr(found, "__dataclass_fields__", None)
        if items is None:
            return True  # below a plugin's options
        if name not in items:
            has_options = any(item.metadata == REST for item in items.values())
            options = option_types(path.replace("/", ".")) if has_options else []
            return any(_is_of(option, kind) for option in options) if options else has_options
        found = field_types(found)[name]
    return _is_of(found, kind)


def _is_of(found: Any, kind: type) -> bool:
    kinds = get_args(found) if get_origin(found) in (Union, UnionType) else (found,)
    return any(kind is (get_origin(one) or one) or kind in get_args(one) for one in kinds)


def _depth(value: str) -> int:
    """Nesting depth of the brackets in a value."""
    return max(accumulate((letter in "[{") - (letter in "]}") for letter in value), default=0)


def calls_sweep(word: str) -> bool:
    """Whether the value is a call of a sweep function, whatever its arguments are."""
    return bool(_SWEEP.fullmatch(split(word)[1]))


def sweep_fault(word: str) -> Fault:
    """The fault of an override that gives several values for one run."""
    path, value = split(word)
    fix = "Give one value, or use trireme sweep."
    ways: list[Mapping[str, Any]] = []
    if "(" not in value and _takes(path, tuple):
        ways.append({path: AsTyped(f"[{value}]")})
        fix += f" A list is written {as_override(path, ways[-1][path])}."
    if "(" not in value and _takes(path, str):
        ways.append({path: value})
        fix += f" One text is written {as_override(path, value)}."
    return Fault(path, value, "these are several values, and one run takes one", fix, ways=tuple(ways))


def secret_fault(path: str, text: str, where: str = "") -> Fault:
    """The fault of a value that would copy an environment variable into the saved configuration."""
    rule = "the value of an environment variable would be written to files that others can read"
    fix = "Give the name of the variable; the ranks read it. What is no secret is written out."
    return Fault(path, text, rule, fix, where)


def unreadable_fault(word: str) -> Fault:
    """The fault of an override that does not parse."""
    path, value = split(word)
    rule = f"cannot be parsed as an override: {_parse_problem(value)}"
    fix = f"If it is one text, paste {as_override(path, value)}."
    return Fault(path, value, rule, fix if _takes(path, str) else "", ways=({path: value},))


def _parse_problem(value: str) -> str:
    """What in the value is most likely the reason that it does not parse."""
    if _CALL.fullmatch(value):
        return "it calls a function"
    if _ESCAPED_QUOTE.search(value):
        return "a quote after a \\ belongs to the text"
    for opening, closing in _PAIRS.items():
        if value.count(opening) != value.count(closing):
            return f"{opening} and {closing} are not balanced"
    for quote in ("'", '"'):
        if value.count(quote) % 2:
            return f"a {quote} is not closed"
    special = next((letter for letter in value if letter in _SPECIAL), "")
    return f"{special} has a special meaning" if special else "it does not follow the grammar"


def refused_fault(word: str, reason: str, siblings: Iterable[str]) -> Fault:
    """The fault of a valid override that cannot be applied to the configuration."""
    path, value = split(word)
    where = f"override {word}"
    known = next((fault for pattern, fault in _REASONS.items() if re.search(pattern, reason)), None)
    if known:
        rule, fix = known
        return Fault(path, value or "(missing)", rule, fix, where)
    if word.startswith("~"):
        return _undeletable(path, value, list(siblings), where)
    if word.startswith("+"):
        return retyped(path, value, "is set already, and + only adds", path, value, where)
    if "${" in value:
        return Fault(
            path, value, reference_rule(reason), reference_fix(path, value, "Write ${group.setting}."), where
        )
    return Fault(path, value, reason.strip().partition("\n")[0], "", where)


def reference_rule(reason: str) -> str:
    """Why a ``${...}`` cannot be resolved, from OmegaConf's message.

    >>> reference_rule("Interpolation key 'nam' not found")
    'there is no setting nam'
    """
    if found := re.search(r"Interpolation key '(.*?)' not found", reason):
        return f"there is no setting {found[1]}"
    if "Unsupported interpolation type" in reason:
        return "calls a function; only other settings can be referred to"
    if "Recursive" in reason or "parent node" in reason:
        return "refers to itself"
    return "does not refer to a setting"


def reference_fix(path: str, text: str, usual: str) -> str:
    """What to write instead of a ``${...}`` that cannot be resolved: the ``usual``, but for a variable."""
    if path.startswith(EXPANDED):
        return "For a variable of the node write $NAME without braces, or \\${NAME}."
    names = re.findall(r"\$\{(?:\w+:)?([A-Z_][A-Z0-9_]*)[^}]*\}", text)
    if names:
        return f"Variables of the environment are not read: write the value of {names[0]} itself."
    return usual


def _undeletable(path: str, value: str, siblings: list[str], where: str) -> Fault:
    name = path.rpartition(".")[2]
    if name in siblings:
        rule = "has another value, so it is not deleted"
        fix = f"Give ~{path} to delete it whatever its value."
        return Fault(path, value, rule, fix, where, ways=({path: LEFT_OUT},))
    rule, near = "there is nothing to delete", nearest(name, siblings)
    way = dict.fromkeys([path, *([join(path.rpartition(".")[0], near)] if near else [])], LEFT_OUT)
    return Fault(path, value or "(missing)", rule, did_you_mean(name, siblings), where, ways=(way,))
