"""The plugins a configuration names: found, loaded, their options checked."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from launcher.base import registry
from launcher.base.errors import LEFT_OUT, Fault, LauncherError, PluginError, did_you_mean, left_out, nearest
from launcher.base.registry import Plugin, PluginRecord
from launcher.contract.config import LaunchConfig
from launcher.contract.executor import Executor
from launcher.contract.optim.config import OptimConfig
from launcher.contract.optim.plugin import Optimizer, optimizer_of
from launcher.contract.strategy import Architecture, Parallel, Schedule
from launcher.typed.read import UNKNOWN, Reading, Source, plain, read

_AXES = ("tp", "pp", "dp")
"""In order of application."""
_HAS_NONE = " has no options"
_EXTRAS = "parallel.plugins"
_COMMON = tuple(name for name in OptimConfig.__dataclass_fields__ if name != "options")
"""Settings of every optimizer, beside which its own stand."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The plugins in use."""

    schedule: Schedule
    architecture: Architecture
    optimizer: Optimizer
    executor: Executor
    parallels: tuple[Parallel, ...]
    """Those that apply, in order of application."""
    candidates: tuple[Parallel, ...]
    """Those that come with the launcher, and those that the configuration names."""
    records: tuple[PluginRecord, ...]

    @property
    def owner(self) -> Parallel | None:
        """The parallel plugin that takes over the update."""
        return next((parallel for parallel in self.parallels if parallel.update), None)


def choose(config: LaunchConfig) -> Chosen:
    """Loads the plugins that a configuration without `plugin_faults` names.

    Raises:
        PluginError: when one of them fails to load, or is not all that its kind has to be.
    """
    applying = applying_parallels(config)
    named = [(kind.entry_group, name) for _, kind, name, *_ in _choices(config) if kind is not Parallel]
    named += [(Parallel.entry_group, name) for name in applying]
    return Chosen(
        schedule=_configured(registry.load(Schedule, config.parallel.schedule), config),
        architecture=registry.load(Architecture, config.architecture.name),
        optimizer=optimizer_of(config),
        executor=registry.load(Executor, config.executor.name),
        parallels=tuple(applying.values()),
        candidates=tuple(candidate_parallels(config).values()),
        records=tuple(registry.record(group, name) for group, name in named),
    )


def candidate_parallels(config: LaunchConfig) -> dict[str, Parallel]:
    """By name, those that come with the launcher and those that a configuration names, if installed."""
    known = registry.plugins(Parallel.entry_group)
    names = dict.fromkeys((*registry.own_plugins(Parallel.entry_group), *config.parallel.plugins))
    loaded = {name: registry.load(Parallel, name) for name in names if name in known}
    for name, found in loaded.items():
        if found.axis not in _AXES:
            raise PluginError(f"the parallel {name!r} has axis {found.axis!r}, none of {', '.join(_AXES)}")
    return dict(sorted(loaded.items(), key=lambda item: _AXES.index(item[1].axis)))


def applying_parallels(config: LaunchConfig) -> dict[str, Parallel]:
    """Those of them that apply, without what others replace, in order of application."""
    applying = {name: found for name, found in candidate_parallels(config).items() if found.applies(config)}
    replaced = {name for found in applying.values() for name in found.replaces}
    return {name: found for name, found in applying.items() if name not in replaced}


def parallel_faults(config: LaunchConfig) -> list[Fault]:
    """Faults of named plugins that do nothing, and of two that would both make the update."""
    applying = applying_parallels(config)
    rule = "has no effect here: it does not apply to this configuration, or another takes its place"
    faults = [
        left_out(f"{_EXTRAS}.{name}", plain(options), rule)
        for name, options in config.parallel.plugins.items()
        if name not in applying
    ]
    owners = [name for name, found in applying.items() if found.update]
    if len(owners) > 1:
        rule = f"{' and '.join(owners)} would each make the update of the parameters, which one can do"
        faults.append(Fault(_EXTRAS, ", ".join(config.parallel.plugins), rule, "Choose one of them."))
    return faults


def _configured(schedule: Schedule, config: LaunchConfig) -> Schedule:
    """The schedule with its options; it never sees the configuration, as the other plugins do.

    Raises:
        PluginError: when it declares options and cannot be made with them.
    """
    declared = getattr(schedule, "Config", None)
    if declared is None:
        return schedule
    options = read(declared, config.parallel.schedule_options, Reading())
    try:
        made: Schedule = type(schedule)(options)  # type: ignore[call-arg]
    except TypeError as error:
        raise PluginError(
            f"the schedule {config.parallel.schedule!r} declares options, and cannot be made with them: "
            f"{error}"
        ) from error
    return made


@contextmanager
def plugin_errors() -> Iterator[None]:
    """Names the plugin whose code an unforeseen error comes from; an error of our own passes through.

    Raises:
        PluginError: with the error and its line.
    """
    try:
        yield
    except LauncherError:
        raise
    except Exception as error:
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            if found := _plugin_of(str(frame.f_globals.get("__name__")), type(frame.f_locals.get("self"))):
                code = frame.f_code
                raise PluginError(
                    f"the {found.kind} {found.name!r} of {found.distribution} {found.version} failed in "
                    f"{code.co_name}: {type(error).__name__}: {error} ({code.co_filename}:{line})"
                ) from error
        raise


def _plugin_of(module: str, owner: type) -> PluginRecord | None:
    """The plugin that is of a class, else one that a module defines."""
    records = [record for group in registry.GROUPS for record in registry.plugins(group).values()]
    by_target = {record.target: record for record in reversed(records)}
    by_module = {record.target.partition(":")[0]: record for record in reversed(records)}
    return by_target.get(f"{owner.__module__}:{owner.__qualname__}", by_module.get(module))


def plugin_faults(config: LaunchConfig, sources: Mapping[str, Source]) -> tuple[Fault, ...]:
    """Faults of unknown plugin names and of options that a plugin does not declare.

    Raises:
        PluginError: when a named plugin fails to load.
    """
    faults: list[Fault] = []
    for path, kind, name, options_path, options in _choices(config):
        known = registry.plugins(kind.entry_group)
        if name not in known:
            rule = f"no {kind.__name__.lower()} of that name is installed"
            ways = ({path: near},) if (near := nearest(name, known)) else ()
            faults.append(Fault(path, name, rule, did_you_mean(name, known), ways=ways))
        else:
            found = _option_faults(registry.load(kind, name), name, options_path, options, sources)
            faults += [_with_owner(fault, path, kind, name) for fault in found]
    return tuple(faults)


def _choices(config: LaunchConfig) -> Iterator[tuple[str, type[Plugin], str, str, Mapping[str, Any]]]:
    """Config path of the name, kind, name, config path of the options, and the options."""
    parallel, architecture, executor = config.parallel, config.architecture, config.executor
    options_path = "parallel.schedule_options"
    yield "parallel.schedule", Schedule, parallel.schedule, options_path, parallel.schedule_options
    yield "architecture.name", Architecture, architecture.name, "architecture", architecture.options
    yield "optim.name", Optimizer, config.optim.name, "optim", config.optim.options
    yield "executor.name", Executor, executor.name, "executor", executor.options
    for name, options in parallel.plugins.items():
        yield f"{_EXTRAS}.{name}", Parallel, name, f"{_EXTRAS}.{name}", options


def _option_faults(
    plugin: object, name: str, path: str, options: Mapping[str, Any], sources: Mapping[str, Source]
) -> list[Fault]:
    declared = getattr(plugin, "Config", None)
    if declared is None:
        return [left_out(f"{path}.{key}", value, f"{name}{_HAS_NONE}") for key, value in options.items()]
    reading = Reading(sources)
    read(declared, options, reading, path)
    return reading.faults


def _with_owner(fault: Fault, choice: str, kind: type[Plugin], name: str) -> Fault:
    """The fault of an option that is not there, with the setting that is meant, or the plugins of the group
    that have one of its name."""
    if fault.allowed != UNKNOWN and not fault.allowed.endswith(_HAS_NONE):
        return fault
    key = fault.path.rpartition(".")[2]
    if kind is Optimizer and (near := nearest(key, (*_option_names(kind, name), *_COMMON))):
        ways = ({fault.path: LEFT_OUT, f"{choice.removesuffix('.name')}.{near}": fault.given},)
        return replace(fault, fix=f"Did you mean {near}?", ways=ways)
    owners = [name for name in registry.plugins(kind.entry_group) if key in _option_names(kind, name)]
    if not owners or kind is Parallel:
        return fault
    names, chosen = " or ".join(owners), choice.removesuffix(".name")
    return replace(fault, fix=f"It belongs to {chosen} {names}.")


def _option_names(kind: type[Plugin], name: str) -> frozenset[str]:
    """Options that a plugin declares; none where it cannot be loaded, which concerns those who choose it."""
    try:
        declared = getattr(registry.load(kind, name), "Config", None)
    except PluginError:
        return frozenset()
    return frozenset(field.name for field in fields(declared)) if declared else frozenset()
