"""The errors that a user can cause, and how they are reported."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from types import MappingProxyType
from typing import Any, Final

from launcher.base.redaction import escaped, hide_secrets, shortened, without_secrets

LEFT_OUT: Final = "(left out)"
"""In a way out, the value of a setting that is not to be given."""
_PLAIN = re.compile(r"~?[\w./:+@%*-]+", re.ASCII)
"""A text that the override grammar takes without quotes."""
_MIN_SIMILARITY = 0.7
"""Least similarity (difflib ratio) at which a name is suggested for another."""


class AsTyped(str):
    """What stands behind the = of an override, to be typed again as it is."""


@dataclass(frozen=True)
class Fault:
    """One wrong value: what was given, what is allowed, how to fix it.

    >>> ways = ({"parallel.pp": 4},)
    >>> print(Fault("parallel.pp", 3, "16 layers split over 1, 2, 4, 8 or 16 stages", ways=ways))
    parallel.pp=3: 16 layers split over 1, 2, 4, 8 or 16 stages. Set parallel.pp=4.
    """

    path: str
    """Config path of the value, such as ``parallel.pp``."""
    given: Any
    """The value as the user wrote it."""
    allowed: str
    """The rule, with its arithmetic."""
    fix: str = ""
    """How to fix it, as a sentence; without one the ``ways`` are printed. What it says to type, they hold."""
    where: str = ""
    """File and line, or the override, that set the value."""
    ways: tuple[Mapping[str, Any], ...] = field(default=(), kw_only=True)
    """Changes that fix it, each by config path, the nearest first. Of those without a sentence the planner
    checks each against every rule before it suggests it, and combines changes that help only together."""

    def __str__(self) -> str:
        allowed = self.allowed.rstrip(".")
        fix = f" {self.fix or offer(self.ways)}".rstrip()
        where = f" [{shortened(hide_secrets(self.where))}]" if self.where else ""
        given = without_secrets(self.given, self.path)
        given = _typed(given) if given is None or isinstance(given, bool) else str(given) or '""'
        text = f"{self.path}={shortened(given)}: {allowed}.{fix}{where}"
        return escaped(hide_secrets(text)).replace("\n", "\\n").replace("\t", "\\t")


def left_out(path: str, given: Any, rule: str) -> Fault:
    """The fault of a setting that has to go."""
    return Fault(path, given, rule, f"Remove {path}.", ways=({path: LEFT_OUT},))


def offer(ways: Iterable[Mapping[str, Any]]) -> str:
    """Changes as text to type; values of one setting are put together. Empty when there are none.

    >>> offer([{"parallel.pp": 4}, {"parallel.pp": 2}, {"parallel.pp": 3, "parallel.dp": "auto"}])
    'Set parallel.pp=4 or 2, or parallel.pp=3 parallel.dp=auto.'
    >>> print(offer([{"optim.betas": [0.9, 0.95]}, {"optim.betas": [0.9, 0.99]}]))
    Set 'optim.betas=[0.9,0.95]' or 'optim.betas=[0.9,0.99]'.
    """
    singles: dict[str, list[str]] = {}
    texts: list[list[str]] = []
    for way in ways:
        (path, value), *more = way.items()
        if not more and path in singles:
            word = as_override(path, value)
            # A word in quotes is one with its path.
            singles[path].append(word if word[0] in "'~" else word.partition("=")[2])
            continue
        texts.append([" ".join(starmap(as_override, way.items()))])
        if not more:
            singles[path] = texts[-1]
    return f"Set {', or '.join(' or '.join(words) for words in texts)}." if texts else ""


def as_override(path: str, value: Any) -> str:
    """A change as it is typed in a shell.

    >>> as_override("optim.betas[0]", 0.9), as_override("parallel.typo", LEFT_OUT)
    ('optim.betas.0=0.9', '~parallel.typo')
    >>> print(as_override("run.dir", "ckpt/epoch=9"))
    'run.dir="ckpt/epoch=9"'
    """
    key = re.sub(r"\[(\d+)\]", r".\1", path)
    if value == LEFT_OUT:
        return f"~{key}"
    if isinstance(value, AsTyped):
        return shlex.quote(f"{key}={value}")
    if not isinstance(value, str) or _PLAIN.fullmatch(value):
        word = f"{key}={_typed(value)}"
        # Shells expand braces, brackets and stars, and no ~ in quotes.
        return shlex.quote(word) if re.search(r"[*{[]", word) else word
    return shlex.quote(f"{key}={quoted(value)}")


def quoted(text: str) -> str:
    """A text in quotes of the override grammar.

    >>> print(quoted('say "hi"'))
    "say \\"hi\\""
    """
    escaped = re.sub(r'(\\*)(")', r"\1\1\\\2", text)
    trailing = len(text) - len(text.rstrip("\\"))
    return f'"{escaped}{chr(92) * trailing}"'


class LauncherError(Exception):
    """Base of every error that the command line reports without a traceback."""


class ConfigError(LauncherError):
    """The configuration is wrong. Holds every fault found, not only the first, and, where it is known, one
    way out of them all."""

    def __init__(self, faults: Iterable[Fault], together: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.faults = tuple(faults)
        self.together = together
        all_at_once = f"\nAll at once: {' '.join(starmap(as_override, together.items()))}" if together else ""
        super().__init__(faults_text(self.faults) + all_at_once)


class PlanError(ConfigError):
    """Every value is well formed, but the strategy they describe cannot run."""


class JobError(LauncherError):
    """A job could not be started, or ended in failure."""


class PeerError(JobError):
    """A rank cannot go on because another one has ended: the cause is that one's."""


class PluginError(LauncherError):
    """A plugin is missing, broken, registered twice, or not the recorded one."""


def faults_text(faults: tuple[Fault, ...]) -> str:
    """All faults as text, one a line, with their number in front when there are several."""
    if len(faults) == 1:
        return str(faults[0])
    lines = [f"{len(faults)} faults:"]
    lines += [f"  {number}. {fault}" for number, fault in enumerate(faults, 1)]
    return "\n".join(lines)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name closest to a misspelt one, or None where none is close.

    In a short name one different letter makes another name; transposed letters are a typing error.

    >>> nearest("paralell", ["parallel", "model"]), nearest("rnu", ["run"]), nearest("gpu", ["cpu"])
    ('parallel', 'run', None)
    """
    known = {str(other).casefold(): str(other) for other in names}
    wanted = str(name).casefold()
    matches = difflib.get_close_matches(wanted, list(known), n=1, cutoff=_MIN_SIMILARITY)
    anagrams = [other for other in known if sorted(other) == sorted(wanted)]
    return next((known[match] for match in (*anagrams, *matches)), None)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint naming the nearest known name, or else all of them."""
    known = sorted(names)
    match = nearest(name, known)
    return f"Did you mean {match}?" if match else f"Known: {', '.join(known) or 'none'}."


def _typed(value: Any) -> str:
    """A value as it is typed after the = of an override, in the grammar of overrides."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_typed(item)}' for key, item in value.items())}}}"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
