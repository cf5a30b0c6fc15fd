"""The plugins a configuration names: found, loaded, their options checked."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from launcher.base import registry
from launcher.base.errors import Fault, LauncherError, PluginError, did_you_mean
from launcher.base.registry import PluginRecord
from launcher.contract.config import LaunchConfig
from launcher.contract.executor import Executor
from launcher.contract.strategy import Architecture, Parallel, Schedule
from launcher.typed.read import UNKNOWN, Reading, Source, read

PARALLEL_OF_AXIS = {"tp": "tensor", "pp": "pipeline", "dp": "data"}
"""Name of the plugin that spreads the work along each axis, in order of application."""
_KINDS = {
    "launcher.schedules": Schedule,
    "launcher.parallels": Parallel,
    "launcher.architectures": Architecture,
    "launcher.executors": Executor,
}
_HAS_NONE = " has no options"
ZERO = "zero"
"""The plugin of the ``dp`` axis where the replicas split the model states."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The plugins in use; of the parallels only those whose axis has more than one rank."""

    schedule: Schedule
    architecture: Architecture
    executor: Executor
    parallels: tuple[Parallel, ...]
    records: tuple[PluginRecord, ...]


def choose(config: LaunchConfig) -> Chosen:
    """Loads the plugins that a configuration without `plugin_faults` names.

    Raises:
        PluginError: when one of them fails to load, or is not all that its kind has to be.
    """
    sizes = {"tp": config.parallel.tp, "pp": config.parallel.pp, "dp": config.parallel.dp}
    names = [name for axis, name in PARALLEL_OF_AXIS.items() if sizes[axis] != 1]
    if config.parallel.zero_stage:
        names = [name for name in names if name != PARALLEL_OF_AXIS["dp"]] + [ZERO]
    named = [(group, name) for _, group, name, _ in _single_choices(config)]
    named += [("launcher.parallels", name) for name in names]
    records = tuple(registry.record(group, name) for group, name in named)
    loaded = [registry.load(group, name) for group, name in named]
    for plugin, found in zip(loaded, records, strict=True):
        _require_methods(plugin, found)
    schedule, architecture, executor, *parallels = loaded
    return Chosen(
        schedule=_configured(schedule, config),
        architecture=architecture,
        executor=executor,
        parallels=tuple(parallels),
        records=records,
    )


def _require_methods(plugin: object, found: PluginRecord) -> None:
    """Refuses a plugin that lacks methods of its kind, before it is asked for one in the middle of a plan."""
    kind = _KINDS[found.group]
    needed = [name for name, value in vars(kind).items() if callable(value) and name[0] != "_"]
    if missing := [name for name in needed if not callable(getattr(plugin, name, None))]:
        raise PluginError(
            f"the {_kind(found)} {found.name!r} of {found.distribution} {found.version} has no "
            f"{' and no '.join(missing)}; see {kind.__module__}.{kind.__name__}"
        )


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
                    f"the {_kind(found)} {found.name!r} of {found.distribution} {found.version} failed in "
                    f"{code.co_name}: {type(error).__name__}: {error} ({code.co_filename}:{line})"
                ) from error
        raise


def _plugin_of(module: str, owner: type) -> PluginRecord | None:
    """The plugin that is of a class, else one that a module defines."""
    records = [record for group in registry.GROUPS for record in registry.plugins(group).values()]
    by_target = {record.target: record for record in reversed(records)}
    by_module = {record.target.partition(":")[0]: record for record in reversed(records)}
    return by_target.get(f"{owner.__module__}:{owner.__qualname__}", by_module.get(module))


def _kind(found: PluginRecord) -> str:
    """``schedule`` for ``launcher.schedules``."""
    return found.group.removeprefix("launcher.").removesuffix("s")


def plugin_faults(config: LaunchConfig, sources: Mapping[str, Source]) -> tuple[Fault, ...]:
    """Faults of unknown plugin names and of options that a plugin does not declare.

    Raises:
        PluginError: when a named plugin fails to load.
    """
    faults: list[Fault] = []
    for path, group, name, (options_path, options) in _single_choices(config):
        known = registry.plugins(group)
        if name not in known:
            kind = group.removeprefix("launcher.").removesuffix("s")
            rule = f"no {kind} of that name is installed"
            faults.append(Fault(path, name, rule, did_you_mean(name, known)))
        else:
            found = _option_faults(registry.load(group, name), name, options_path, options, sources)
            faults += [_with_owner(fault, path, group) for fault in found]
    return tuple(faults)


def _single_choices(config: LaunchConfig) -> list[tuple[str, str, str, tuple[str, Mapping[str, Any]]]]:
    """(config path of the name, entry-point group, name, (config path of the options, options))."""
    parallel, architecture, executor = config.parallel, config.architecture, config.executor
    of_schedule = ("parallel.schedule_options", parallel.schedule_options)
    of_architecture = ("architecture", architecture.options)
    of_executor = ("executor", executor.options)
    return [
        ("parallel.schedule", "launcher.schedules", parallel.schedule, of_schedule),
        ("architecture.name", "launcher.architectures", architecture.name, of_architecture),
        ("executor.name", "launcher.executors", executor.name, of_executor),
    ]


def _option_faults(
    plugin: object, name: str, path: str, options: Mapping[str, Any], sources: Mapping[str, Source]
) -> list[Fault]:
    declared = getattr(plugin, "Config", None)
    if declared is None:
        return [
            Fault(f"{path}.{key}", value, f"{name}{_HAS_NONE}", f"Remove {path}.{key}.")
            for key, value in options.items()
        ]
    reading = Reading(sources)
    read(declared, options, reading, path)
    return reading.faults


def _with_owner(fault: Fault, choice: str, group: str) -> Fault:
    """The fault of an option that is not there, with the plugins of the group that have one of its name."""
    if fault.allowed != UNKNOWN and not fault.allowed.endswith(_HAS_NONE):
        return fault
    key = fault.path.rpartition(".")[2]
    owners = [name for name in registry.plugins(group) if key in _option_names(group, name)]
    if not owners:
        return fault
    return replace(fault, fix=f"It belongs to {choice.removesuffix('.name')}={' or '.join(owners)}.")


def _option_names(group: str, name: str) -> frozenset[str]:
    """Options that a plugin declares; none where it cannot be loaded, which concerns those who choose it."""
    try:
        declared = getattr(registry.load(group, name), "Config", None)
    except PluginError:
        return frozenset()
    return frozenset(field.name for field in fields(declared)) if declared else frozenset()
