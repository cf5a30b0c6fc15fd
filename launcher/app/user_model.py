"""Asks a process of its own what a user's model and data are like, so that planning never imports torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import PathFinder

from launcher.base.errors import ConfigError, Fault, PlanError
from launcher.base.units import format_duration
from launcher.contract.config import LaunchConfig
from launcher.contract.inputs.user_code import shadowed_files
from launcher.contract.model.shape import Measured
from launcher.plan.rules.checks import with_sources
from launcher.typed.read import Source, plain, read_or_raise

_MODULE = "launcher.runtime.process.measure"
_LIMIT_S = 600.0
"""Seconds that measuring may take."""


def source_roots(config: LaunchConfig, folders: Sequence[str]) -> tuple[str, ...]:
    """The folders that the ranks need on their module path: none without a user's own model or data."""
    if not _targets(config):
        return ()
    return tuple(dict.fromkeys(os.path.abspath(folder) for folder in folders))


def is_seen_here(config: LaunchConfig) -> bool:
    """Whether what the ranks import is measured in this environment. A user's own model always is, as it
    cannot be planned else; data that are in a container, or that another Python reads, are told by the ranks
    alone."""
    is_elsewhere = config.site.container_image is not None or config.site.python is not None
    return config.model.family == "custom" or not is_elsewhere


def refuse_shadowed(config: LaunchConfig, roots: Sequence[str], sources: Mapping[str, Source]) -> None:
    """Refuses modules of the user's whose names mean others, which come before them.

    Raises:
        ConfigError: with both files.
    """
    targets, faults = _targets(config), []
    setting = next(iter(targets), "")
    for module, (path, other) in shadowed_files(config, roots).items():
        rule = f"it imports {module}, which is {other or 'a module of Python'}, not {path}"
        faults.append(Fault(setting, targets[setting], rule, f"Rename {path}."))
    if faults:
        raise ConfigError(with_sources(faults, sources))


def measured_code(config: LaunchConfig, roots: Sequence[str]) -> Measured:
    """What a user's own model and dataset are like, whose modules are below ``roots`` or
    installed.

    Raises:
        PlanError: when one of them cannot be made, or not in time: with its faults, or with the last line of
            what its process left behind.
    """
    if faults := list(_missing_modules(config, roots)):
        raise PlanError(faults)
    return _measure(request_of(config, roots))


def request_of(config: LaunchConfig, roots: Sequence[str] = ()) -> str:
    """What `launcher.runtime.process.measure` is asked: the same whatever the layout."""
    is_own = config.model.family == "custom"
    request = {
        "source_roots": list(roots),
        "model": plain(config.model) if is_own else None,
        "data": plain(config.data),
        "seq_length": config.batch.seq_length,
        "compute": config.precision.compute if is_own else "fp32",
    }
    return json.dumps(request)


def _missing_modules(config: LaunchConfig, roots: Sequence[str]) -> Iterator[Fault]:
    """Faults of modules that are nowhere; none is imported."""
    for path, target in _targets(config).items():
        name = target.partition(":")[0].partition(".")[0]
        beside = PathFinder.find_spec(name, roots)
        if beside or any(finder.find_spec(name, None) for finder in sys.meta_path):
            continue  # editable installs have a finder of their own
        rule = f"no module {name} is beside the recipe, in the current folder, or installed"
        yield Fault(path, target, rule, f"Put {name}.py beside the recipe.")


def _targets(config: LaunchConfig) -> dict[str, str]:
    """What is named of the user's code, by setting."""
    targets = {"model.target": config.model.target, "data.target": config.data.target}
    return {setting: target for setting, target in targets.items() if target}


@cache
def _measure(request: str) -> Measured:
    """The answer of the other process; the points of a sweep and a baseline ask the same."""
    with subprocess.Popen(  # noqa: S603 (our own module, no shell)
        [sys.executable, "-m", _MODULE],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            found, errors = process.communicate(request, timeout=_LIMIT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # with what the user's code has started
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            rule = f"measuring took longer than {format_duration(_LIMIT_S)}, and was ended"
            fix = "Do beforehand what takes so long, such as a download."
            raise PlanError([_fault(request, rule, fix)]) from None
    if process.returncode == 0:
        return read_or_raise(Measured, json.loads(found))
    if found:
        raise PlanError(Fault(**fault | {"ways": tuple(fault["ways"])}) for fault in json.loads(found))
    told = errors.strip().splitlines() if process.returncode > 0 else ()
    reason = told[-1] if told else f"the process ended with status {process.returncode}"
    raise PlanError([_fault(request, f"could not be measured: {reason}")])


def _fault(request: str, rule: str, fix: str = "") -> Fault:
    """A fault of the user's model, or where it has none, of the data."""
    asked = json.loads(request)
    name = "model" if asked["model"] else "data"
    return Fault(f"{name}.target", asked[name]["target"], rule, fix)
