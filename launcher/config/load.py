"""From plain composed values to the typed configuration, with every fault at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.base.errors import ConfigError, Fault
from launcher.base.redaction import HIDDEN
from launcher.config.rules import broken_rules
from launcher.config.site_rules import Broken, secret_rules
from launcher.contract.config import LaunchConfig
from launcher.typed.read import MISSING, Reading, Source, field_types, read_fields

_MAY_BE_NULL = re.compile(r"name|report\.baseline|(model|data)\.options\..+")
_NO_VALUE = {"report.baseline": "none"}
"""What stands for no value where that is not null."""


def load(
    values: Mapping[str, Any], sources: Mapping[str, Source], faults: Sequence[Fault] = ()
) -> LaunchConfig:
    """The typed configuration: types, ranges, unknown keys, and the rules inside and between groups.

    ``faults`` were found while the values were composed. What has one is judged no further: a group
    with a value that was not understood may break a rule only for that reason.

    Raises:
        ConfigError: with every fault found, each with the file and line or the override it is from.
    """
    reading = Reading(sources)
    parts = read_fields(LaunchConfig, values, reading)
    known = {fault.path for fault in faults}
    found = [
        *faults,
        *(fault for fault in _unread(reading.faults, values, sources) if fault.path not in known),
    ]
    spoiled = {re.split(r"[.\[]", fault.path)[0] for fault in found}
    sound = {name: part for name, part in parts.items() if name not in spoiled}
    known = {fault.path for fault in found}
    for path, given, rule, fix in (*broken_rules(sound), *secret_rules(values), *_words_for_null(sources)):
        if path not in known:
            known.add(path)
            source = sources.get(path, Source(where=""))
            written = given if source.text is None or given == HIDDEN else source.text
            found.append(Fault(path, written, rule, fix, source.where))
    if found:
        raise ConfigError(found)
    return LaunchConfig(**parts)


def _unread(
    faults: Sequence[Fault], values: Mapping[str, Any], sources: Mapping[str, Source]
) -> Iterator[Fault]:
    """The faults of reading, those of one cause as one."""
    groups = [
        item.name for item in dataclasses.fields(LaunchConfig) if item.default_factory is dataclasses.MISSING
    ]
    absent = [name for name in groups if name not in values and name not in sources]
    is_bare = len(absent) > 1
    if is_bare:
        fix = "Begin the recipe with `defaults: [/base, _self_]`."
        yield Fault("defaults", MISSING, f"nothing gives {', '.join(absent)}", fix)
    for fault in faults:
        if fault.path == "sweep":
            rule, fix = "the recipe is a sweep, which is several runs", "Use trireme sweep, or give ~sweep."
            yield replace(fault, given="...", allowed=rule, fix=fix)
            continue
        kind, given = field_types(LaunchConfig).get(fault.path), values.get(fault.path)
        if dataclasses.is_dataclass(kind) and isinstance(given, str):
            fix = f"To choose a file of the group, write `override /{fault.path}: {given}` into `defaults`."
            yield replace(fault, fix=fix)
        elif not (is_bare and fault.given == MISSING):
            yield fault


def _words_for_null(sources: Mapping[str, Source]) -> Iterator[Broken]:
    """The unquoted word None, where a text is allowed and null is what its writer means."""
    for path, source in sources.items():
        if source.text == "None" and _MAY_BE_NULL.fullmatch(path):
            fix = f"Write {_NO_VALUE.get(path, 'null')} for no value."
            yield path, source.text, "None is a text only in quotes", fix
