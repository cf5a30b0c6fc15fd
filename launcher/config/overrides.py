"""Override words: what their parts mean, what is wrong with them, and the line to paste instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any

from launcher.config import origins
from launcher.errors import Fault, did_you_mean
from launcher.scalars import scalar
from launcher.typed import Source

_KEY = re.compile(r"[\w$./@:-]+")
_SWEEP = re.compile(r"(choice|range|interval|glob|shuffle|sort)\(.*\)", re.DOTALL)


class PlainText(str):
    """An unquoted scalar of an override as it was written, escapes undone."""


def typed(value: Any, path: str, where: str, marks: dict[str, Source]) -> Any:
    """A value parsed from an override, its plain texts read as in YAML; notes the source of each part."""
    is_plain = isinstance(value, PlainText) and "${" not in value
    marks[path] = Source(where=where, text=str(value) if is_plain else None)
    if isinstance(value, list):
        return [typed(item, f"{path}[{place}]", where, marks) for place, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: typed(item, origins.join(path, key), where, marks) for key, item in value.items()}
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


def quoted(word: str) -> str:
    """The override with its value quoted for the override grammar and for the shell.

    >>> print(quoted("run.dir=ckpt/epoch=9"))
    'run.dir="ckpt/epoch=9"'
    """
    key, _, value = word.partition("=")
    escaped = re.sub(r'(\\*)(")', r"\1\1\\\2", value)
    trailing = len(value) - len(value.rstrip("\\"))
    return shlex.quote(f'{key}="{escaped}{chr(92) * trailing}"')


def word_fault(word: str) -> Fault | None:
    """The fault of a word that no grammar needs to be asked about."""
    path, value = split(word)
    if word.startswith("\\"):
        fix = f"Give {shlex.quote(word.lstrip(chr(92)))}."
        rule = "starts with a backslash, as when a line continuation is pasted"
        return Fault(path, value, rule, fix)
    if word.startswith("="):
        return Fault("(nothing)", value, "an override is written key=value", f"Give KEY{shlex.quote(word)}.")
    if path.endswith(":"):
        fixed = word.replace(":=", "=", 1)
        return Fault(path, value, "has a stray colon before the =", f"Give {shlex.quote(fixed)}.")
    if "=" not in word and not word.startswith("~"):
        return Fault(path, "(nothing)", "an override is written key=value", f"Give {path}=VALUE.")
    if "=" in word and not value:
        fix = f"Give {path}=null for no value, or {quoted(word)} for an empty text."
        return Fault(path, "(nothing)", "has no value after the =", fix)
    if "oc.env" in value:
        return secret_fault(path, value)
    return sweep_fault(word) if _SWEEP.fullmatch(value) else None


def sweep_fault(word: str) -> Fault:
    """The fault of an override that asks for several runs."""
    path, value = split(word)
    fix = f"Give one value, or sweep over them: trireme sweep RECIPE {shlex.quote(word)}."
    if "(" not in value:
        listed = shlex.quote(f"{word.partition('=')[0]}=[{value}]")
        fix = f"{fix} A list is written {listed}, one text {quoted(word)}."
    return Fault(path, value, "several values ask for several runs", fix)


def secret_fault(path: str, text: str, where: str = "") -> Fault:
    """The fault of a value that would copy an environment variable into the saved configuration."""
    rule = "the value of an environment variable would be written to files that others can read"
    return Fault(path, text, rule, "Give the name of the variable; the ranks read it.", where)


def unreadable_fault(word: str, reason: str) -> Fault:
    """The fault of a word that the override grammar refuses."""
    path, value = split(word)
    rule = f"is not readable as an override ({reason.strip()})"
    if not _KEY.fullmatch(path):
        return Fault(path, value, rule, "A key holds letters, digits and _, joined by dots.")
    return Fault(path, value, rule, f"If it is one text, paste {quoted(word)}.")


def refused_fault(word: str, reason: str, siblings: Iterable[str]) -> Fault:
    """The fault of a readable override that cannot be applied to the configuration."""
    path, value = split(word)
    where = f"override {word}"
    if word.startswith("~"):
        name = path.rpartition(".")[2]
        return Fault(
            path, value or "(missing)", "there is nothing to delete", did_you_mean(name, siblings), where
        )
    if word.startswith("+"):
        fix = f"Give {shlex.quote(word.lstrip('+'))}."
        return Fault(path, value, "is set already, and + only adds", fix, where)
    return Fault(path, value, reason.strip().partition("\n")[0], "", where)
