"""Asks a process of its own for the shape of a user's model, so that planning never imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache

from launcher.base.errors import ConfigError, Fault, PlanError
from launcher.contract.config import LaunchConfig
from launcher.contract.inputs.user_code import shadowed_files
from launcher.contract.model.shape import ModelShape
from launcher.plan.rules.checks import with_sources
from launcher.typed.read import Source, plain, read_or_raise

_MODULE = "launcher.runtime.model.measure_shape"


def source_roots(config: LaunchConfig, folders: Sequence[str]) -> tuple[str, ...]:
    """The folders that the ranks need on their module path: none without a user's own model or data."""
    if config.model.target is None and config.data.target is None:
        return ()
    return tuple(dict.fromkeys(os.path.abspath(folder) for folder in folders))


def refuse_shadowed(config: LaunchConfig, roots: Sequence[str], sources: Mapping[str, Source]) -> None:
    """Refuses modules of the user's whose names mean others, which come before them.

    Raises:
        ConfigError: with both files.
    """
    targets = {"model.target": config.model.target, "data.target": config.data.target}
    setting = next((setting for setting, target in targets.items() if target), "model.target")
    faults = []
    for module, (path, other) in shadowed_files(config, roots).items():
        rule = f"it imports {module}, which is {other or 'a module of Python'}, not {path}"
        faults.append(Fault(setting, targets[setting], rule, f"Rename {path}."))
    if faults:
        raise ConfigError(with_sources(faults, sources))


def measured_shape(config: LaunchConfig, roots: Sequence[str]) -> ModelShape:
    """The shape of a user's own model on its data, whose modules are below ``roots`` or installed.

    Raises:
        PlanError: when the user's model or dataset cannot be made: with its faults, or with the last line of
            what it raised.
    """
    sections = ("model", "data", "batch", "precision")
    request = {name: plain(getattr(config, name)) for name in sections}
    return _measure(json.dumps({**request, "source_roots": list(roots)}))


@cache
def _measure(request: str) -> ModelShape:
    """The answer of the other process; the points of a sweep ask the same."""
    done = subprocess.run(  # noqa: S603 (our own module, no shell)
        [sys.executable, "-m", _MODULE],
        input=request,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        if done.stdout:
            found = json.loads(done.stdout)
            raise PlanError(Fault(**fault | {"ways": tuple(fault["ways"])}) for fault in found)
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        rule = f"its shape could not be measured: {reason}"
        raise PlanError([Fault("model.target", json.loads(request)["model"]["target"], rule)])
    return read_or_raise(ModelShape, json.loads(done.stdout))
