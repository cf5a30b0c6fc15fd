"""The errors that a user can cause, and how they are reported."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.base.redaction import escaped, hide_secrets, shortened, without_secrets

_MIN_SIMILARITY = 0.7
"""Least similarity (difflib ratio) at which a name is suggested for another."""


@dataclass(frozen=True)
class Fault:
    """One wrong value: what was given, what is allowed, how to fix it.

    >>> print(Fault("parallel.pp", 3, "16 layers split over 1, 2, 4, 8 or 16 stages", "Set parallel.pp=4."))
    parallel.pp=3: 16 layers split over 1, 2, 4, 8 or 16 stages. Set parallel.pp=4.
    """

    path: str
    """Config path of the value, such as ``parallel.pp``."""
    given: Any
    """The value as the user wrote it."""
    allowed: str
    """The rule, with its arithmetic."""
    fix: str = ""
    """How to fix it, as text to type; printed after the ``ways``."""
    where: str = ""
    """File and line, or the override, that set the value."""
    ways: tuple[Mapping[str, Any], ...] = field(default=(), kw_only=True)
    """Changes that may fix it, each by config path, the nearest first. The planner checks each against
    every rule before it suggests it, and combines changes that help only together."""

    def __str__(self) -> str:
        allowed = self.allowed.rstrip(".")
        fix = "".join(f" {text}" for text in (offer(self.ways), self.fix) if text)
        where = f" [{shortened(hide_secrets(self.where))}]" if self.where else ""
        given = without_secrets(self.given, self.path)
        given = _typed(given) if given is None or isinstance(given, bool) else str(given) or '""'
        text = f"{self.path}={shortened(given)}: {allowed}.{fix}{where}"
        return escaped(hide_secrets(text)).replace("\n", "\\n").replace("\t", "\\t")


def offer(ways: Iterable[Mapping[str, Any]]) -> str:
    """Changes as text to type; values of one setting are put together. Empty when there are none.

    >>> offer([{"parallel.pp": 4}, {"parallel.pp": 2}, {"parallel.pp": 3, "parallel.dp": "auto"}])
    'Set parallel.pp=4 or 2, or parallel.pp=3 parallel.dp=auto.'
    """
    singles: dict[str, list[str]] = {}
    texts: list[list[str]] = []
    for way in ways:
        (path, value), *more = way.items()
        if not more and path in singles:
            singles[path].append(_typed(value))
            continue
        texts.append([" ".join(f"{name}={_typed(item)}" for name, item in way.items())])
        if not more:
            singles[path] = texts[-1]
    return f"Set {', or '.join(' or '.join(words) for words in texts)}." if texts else ""


class LauncherError(Exception):
    """Base of every error that the command line reports without a traceback."""


class ConfigError(LauncherError):
    """The configuration is wrong. Holds every fault found, not only the first."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__(faults_text(self.faults))


class PlanError(ConfigError):
    """Every value is well formed, but the strategy they describe cannot run."""


class JobError(LauncherError):
    """A job could not be started, or ended in failure."""


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
    """A value as it is typed after the = of an override; a group in quotes, as shells expand braces."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed, value))}]"
    if isinstance(value, Mapping):
        return f'"{{{",".join(f"{name}:{_typed(item)}" for name, item in value.items())}}}"'
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
