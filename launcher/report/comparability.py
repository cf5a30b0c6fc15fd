"""What must be the same in two runs for a speedup to mean something, and what only deserves a note."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from launcher.base.errors import Fault
from launcher.config.baseline import of_baseline
from launcher.contract.config import NOT_COMPUTED, LaunchConfig
from launcher.report.runs import Run
from launcher.typed.differences import differences
from launcher.typed.read import plain

_REQUIRED = ("model", "data", "precision", "batch.seq_length", "device.name", "device.kind")
_NOTED = ("seed", "optim", "train", "fusion", "data.prefetch_batches")


def faults(run: Run, reference: Run) -> Iterator[Fault]:
    """Every setting that makes two runs incomparable."""
    for fault in incomparable(run.plan.config, reference.plan.config, reference.name):
        yield replace(fault, where=run.name)


def incomparable(config: LaunchConfig, reference: LaunchConfig, name: str) -> Iterator[Fault]:
    """Every setting that makes a run incomparable with the one of this name."""
    rule = "and a speedup compares runs of the same model, data, precision, sequence length and device"
    found = differences(plain(config), plain(reference), _REQUIRED, NOT_COMPUTED)
    for path, given, other in sorted(found, key=itemgetter(0)):
        yield Fault(path, given, f"{name} has {other}, {rule}", "Compare with one that has the same.")


def noted_differences(run: Run, reference: Run) -> list[str]:
    """Settings that may change the time or the loss, as ``path (value, reference value)``."""
    mine, theirs = (plain(of_baseline(each.plan.config)) for each in (run, reference))
    found = differences(mine, theirs, _NOTED)
    return sorted(f"{path} ({given}, {reference.name}: {other})" for path, given, other in found)
