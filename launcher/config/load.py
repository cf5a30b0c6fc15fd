"""From plain composed values to the typed configuration, with every fault at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from launcher.base import registry
from launcher.base.errors import LEFT_OUT, ConfigError, Fault, LauncherError
from launcher.base.redaction import HIDDEN
from launcher.base.registry import Plugin
from launcher.config.paths import mapped, walk
from launcher.config.rules import rule_faults
from launcher.config.site_rules import secret_faults
from launcher.contract.config import LaunchConfig
from launcher.contract.executor import Executor
from launcher.contract.optim.config import OptimConfig
from launcher.contract.optim.plugin import Optimizer
from launcher.contract.strategy import Architecture, Parallel, Schedule
from launcher.typed.read import MISSING, UNKNOWN, Reading, Source, field_types, read, read_fields

_OWN_KEYS: Mapping[type[Plugin], Collection[str]] = {
    Architecture: ("name",),
    Executor: ("name",),
    Optimizer: tuple(OptimConfig.__dataclass_fields__),
}
"""Keys of a group that are not settings of the plugin that it names."""
_TEXT_OR_NULL = re.compile(r"name|report\.baseline|(model|data)\.options\..+")


def load(
    values: Mapping[str, Any], sources: Mapping[str, Source], faults: Sequence[Fault] = ()
) -> LaunchConfig:
    """The typed configuration: types, ranges, unknown keys, and the rules inside and between groups.

    ``faults`` were found while the values were composed. A group with a fault is not checked further:
    it might violate another rule only because of that fault.

    Raises:
        ConfigError: with every fault found, each with the file and line or the override it is from.
    """
    values, reading = as_read(values, sources), Reading(sources)
    parts = read_fields(LaunchConfig, values, reading)
    reading.faults += _option_faults(values, sources)
    known = {fault.path for fault in faults}
    found = [
        *faults,
        *(fault for fault in _read_faults(reading.faults, values, sources) if fault.path not in known),
    ]
    faulty = {re.split(r"[.\[]", fault.path)[0] for fault in found}
    sound = {name: part for name, part in parts.items() if name not in faulty}
    known = {fault.path for fault in found}
    for fault in (*rule_faults(sound), *secret_faults(values), *_none_faults(sources)):
        if fault.path not in known:
            known.add(fault.path)
            source = sources.get(fault.path, Source(where=""))
            written = fault.given if source.text is None or fault.given == HIDDEN else source.text
            found.append(replace(fault, given=written, where=source.where))
    if found:
        raise ConfigError(found)
    return LaunchConfig(**parts)


def _option_faults(values: Mapping[str, Any], sources: Mapping[str, Source]) -> list[Fault]:
    """Faults of the values of plugins' options; an unknown option is told with the plugins that have it,
    where plans are made."""
    reading = Reading(sources)
    for path, declared, options in plugin_options(values):
        read(declared, options, reading, path)
    return [fault for fault in reading.faults if fault.allowed != UNKNOWN]


def as_read(values: Mapping[str, Any], sources: Mapping[str, Source]) -> dict[str, Any]:
    """Composed values as the settings' types read them: where text is expected, as it was typed, even if it
    looks like a number. What cannot be read stays as it is."""
    reading = Reading(sources)
    read_fields(LaunchConfig, values, reading)
    for path, declared, options in plugin_options(values):
        read(declared, options, reading, path)
    texts = reading.texts
    found: dict[str, Any] = mapped(values, lambda path, value: texts.get(path, value))
    return found


def plugin_options(values: Mapping[str, Any]) -> Iterator[tuple[str, type, Mapping[str, Any]]]:
    """Config path, declaring class and values of the options of every plugin that is named, if it loads."""
    found = dict(walk(values))
    named: list[tuple[type[Plugin], Any, str]] = [
        (Schedule, found.get("parallel.schedule"), "parallel.schedule_options"),
        (Architecture, found.get("architecture.name"), "architecture"),
        (Optimizer, found.get("optim.name"), "optim"),
        (Executor, found.get("executor.name"), "executor"),
    ]
    named += [(Parallel, name, f"parallel.plugins.{name}") for name in found.get("parallel.plugins") or ()]
    for kind, name, path in named:
        with suppress(LauncherError):
            declared, group = getattr(registry.load(kind, str(name)), "Config", None), found.get(path)
            if declared and isinstance(group, Mapping):
                own = _OWN_KEYS.get(kind, ())
                yield path, declared, {key: group[key] for key in group if key not in own}


def option_types(path: str) -> list[Any]:
    """The types of the option at a path, of every plugin that a group could name; none: no plugin has it."""
    group, _, name = path.partition(".")
    kinds = {"architecture": Architecture, "executor": Executor, "optim": Optimizer}
    found = []
    for plugin in registry.plugins(kinds[group].entry_group) if group in kinds else ():
        with suppress(LauncherError):
            config = getattr(registry.load(kinds[group], plugin), "Config", None)
            found += [kind for own, kind in field_types(config).items() if own == name] if config else []
    return found


def _read_faults(
    faults: Sequence[Fault], values: Mapping[str, Any], sources: Mapping[str, Source]
) -> Iterator[Fault]:
    """The faults of reading, those with one cause joined."""
    groups = [
        item.name for item in dataclasses.fields(LaunchConfig) if item.default_factory is dataclasses.MISSING
    ]
    absent = [name for name in groups if name not in values and name not in sources]
    is_bare = len(absent) > 1
    if is_bare:
        fix = "Begin the recipe with `defaults: [/base, _self_]`."
        yield Fault("defaults", MISSING, f"no file sets {', '.join(absent)}", fix)
    for fault in faults:
        if fault.path == "sweep":
            rule, fix = "the recipe is a sweep, which is several runs", "Use trireme sweep, or give ~sweep."
            yield replace(fault, given="...", allowed=rule, fix=fix, ways=({"sweep": LEFT_OUT},))
            continue
        if re.split("[./]", fault.path)[0] == "hydra":
            rule = "Hydra merges the files here and starts nothing, so its own settings have no effect"
            fix = "Leave it out; run.dir names the directory of a run, and trireme submit uses a scheduler."
            yield replace(fault, given="...", allowed=rule, fix=fix, ways=({fault.path: LEFT_OUT},))
            continue
        kind, given = field_types(LaunchConfig).get(fault.path), values.get(fault.path)
        if dataclasses.is_dataclass(kind) and isinstance(given, str):
            fix = f"To choose a file of the group, write `override /{fault.path}: {given}` into `defaults`."
            yield replace(fault, fix=fix, ways=({fault.path: given},))
        elif not (is_bare and fault.given == MISSING):
            yield fault


def _none_faults(sources: Mapping[str, Source]) -> Iterator[Fault]:
    """The unquoted word None where text is allowed: its writer means null."""
    for path, source in sources.items():
        if source.text == "None" and _TEXT_OR_NULL.fullmatch(path):
            word = "none" if path == "report.baseline" else None
            fix = f"Write {word or 'null'} for no value."
            yield Fault(path, source.text, "None is a text only in quotes", fix, ways=({path: word},))
