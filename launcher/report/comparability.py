"""What must be the same in two runs for a speedup to mean something, and what only deserves a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from launcher.base.errors import Fault
from launcher.contract.config import LaunchConfig
from launcher.report.runs import Run
from launcher.typed.read import plain

_REQUIRED = ("model", "data", "precision", "batch.seq_length", "device.name", "device.kind")
_FREE = ("model.name", "data.name", "data.cache_dir", "data.prefetch_batches", "precision.name")
"""Labels, and settings that change how fast but not what is computed."""
_NOTED = ("seed", "optim", "train", "fusion", "data.prefetch_batches")


def faults(run: Run, reference: Run) -> Iterator[Fault]:
    """Every setting that makes two runs incomparable."""
    for fault in incomparable(run.plan.config, reference.plan.config, reference.name):
        yield replace(fault, where=run.name)


def incomparable(config: LaunchConfig, reference: LaunchConfig, name: str) -> Iterator[Fault]:
    """Every setting that makes a run incomparable with the one of this name."""
    for path, given, other in differences(config, reference, _REQUIRED):
        if path not in _FREE:
            rule = (
                f"{name} has {other}, and a speedup compares runs of the same model, data, "
                "precision, sequence length and device"
            )
            yield Fault(path, given, rule, f"Compare with a run of {path}={given}.")


def noted_differences(run: Run, reference: Run) -> list[str]:
    """Settings that may change the time or the loss, as ``path (value, reference value)``."""
    found = differences(run.plan.config, reference.plan.config, _NOTED)
    return [f"{path} ({given}, {reference.name}: {other})" for path, given, other in found]


def differences(
    config: LaunchConfig, other: LaunchConfig, parts: tuple[str, ...]
) -> Iterator[tuple[str, Any, Any]]:
    """The settings under ``parts`` that differ: path and both values."""
    mine, theirs = dict(_leaves(plain(config))), dict(_leaves(plain(other)))
    for path in sorted(mine.keys() | theirs.keys()):
        is_asked = any(path == part or path.startswith(f"{part}.") for part in parts)
        if is_asked and mine.get(path) != theirs.get(path):
            yield path, mine.get(path), theirs.get(path)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
