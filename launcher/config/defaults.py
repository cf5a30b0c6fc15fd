"""The shape of a defaults list: which files a file is merged with, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.errors import Fault
from launcher.typed import Source

_FIX = "Write `defaults: [/base, override /model: tiny, _self_]`."


def defaults_faults(values: Mapping[str, Any], marks: Mapping[str, Source]) -> Iterator[Fault]:
    """Faults of what is no name of a file and no ``group: name``."""
    if "defaults" not in values:
        return
    entries = values["defaults"]
    if not isinstance(entries, list):
        yield Fault("defaults", entries, "must be a list of files", _FIX, _where("defaults", marks))
        return
    for place, entry in enumerate(entries):
        path = f"defaults[{place}]"
        if not _is_entry(entry):
            rule = "must be the name of a file, or `group: name`"
            yield Fault(path, entry, rule, _FIX, _where(path, marks))
        elif entry in entries[:place]:
            yield Fault(path, entry, "stands twice in the list", "Remove one.", _where(path, marks))


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, Mapping):
        return len(entry) == 1 and all(_is_choice(name) for name in entry.values())
    return isinstance(entry, str)


def _is_choice(name: Any) -> bool:
    """A file, several of them, or null for none."""
    names = name if isinstance(name, list) else [name]
    return all(isinstance(item, str) or item is None for item in names)


def _where(path: str, marks: Mapping[str, Source]) -> str:
    return marks[path].where if path in marks else ""
