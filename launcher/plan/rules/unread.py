"""Settings that nothing reads, by what the schema declares: they would silently do nothing.

What becomes of one depends on who set it, and on who took its effect away:

    given by              made moot by                               becomes
    a group's file        anything                                   nothing: a default is for every recipe
    recipe or override    a default, itself, what it extends         a fault
    recipe                a recipe that extends it, or an override   a note
    word of a sweep       an axis of the sweep                       a note
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.base.errors import Fault
from launcher.config.load import plugin_options
from launcher.config.paths import value_at
from launcher.contract.config import LaunchConfig
from launcher.typed.read import Condition, Reading, Source, condition_of, field_types, join, plain, read

_NOWHERE = Source(where="")


def unread_faults(config: LaunchConfig, sources: Mapping[str, Source]) -> list[Fault]:
    """Faults of settings without an effect, of those who set them knowing what takes the effect away."""
    return [fault for fault, is_note in _unread(config, sources) if not is_note]


def unread_notes(config: LaunchConfig, sources: Mapping[str, Source]) -> list[str]:
    """Notes on settings of a recipe that have no effect under what a later recipe or an override sets."""
    return [str(dataclasses.replace(fault, fix="")) for fault, is_note in _unread(config, sources) if is_note]


def conditions(cls: type, path: str = "") -> Iterator[tuple[str, Condition]]:
    """The settings of a class, and of those below it, that are not always read."""
    for item in dataclasses.fields(cls):
        inner, kind = join(path, item.name), field_types(cls)[item.name]
        if condition := condition_of(item):
            yield inner, condition
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from conditions(kind, inner)


def _unread(config: LaunchConfig, sources: Mapping[str, Source]) -> Iterator[tuple[Fault, bool]]:
    """A fault for every given setting that is not read, and whether it is a note only."""
    given = {path: source for path, source in sources.items() if source.is_given}
    if not given:
        return
    declared = [*conditions(LaunchConfig)]
    values: dict[str, Any] = {}
    for path, cls, options in plugin_options(plain(config)):
        declared += conditions(cls, path)
        made = read(cls, options, Reading())
        values |= {join(path, name): value for name, value in vars(made).items()} if made else {}
    for path, condition in declared:
        value = values.get(condition.path, value_at(config, condition.path))
        if condition.holds(value):
            continue
        rule = f"has no effect while {condition.path} is {'null' if value is None else value}"
        cause = sources.get(condition.path, _NOWHERE).layer
        for leaf in _leaves(path, given):
            own = values.get(leaf, value_at(config, leaf))
            if own is not None and own != condition.neutral:
                shown = own if given[leaf].text is None else given[leaf].text
                ways = tuple({condition.path: value} for value in condition.values if condition.is_read)
                fault = Fault(leaf, shown, rule, _fix(condition), given[leaf].where, ways=ways)
                yield fault, given[leaf].layer < cause


def _fix(condition: Condition) -> str:
    values = " or ".join(map(str, condition.values))
    other = f"{condition.path}={values}" if condition.is_read else f"another {condition.path}"
    return f"Leave it out, or set {other}."


def _leaves(path: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Those of some settings that are a setting, or below it if that is a group."""
    below = [known for known in given if known == path or known.startswith(f"{path}.")]
    return (known for known in below if not any(other.startswith(f"{known}.") for other in below))
