"""The baseline of a submitted run: one that is there already, or a job of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from launcher.app.baseline import baseline_search, coming_baseline, find_baseline, is_to_be_found
from launcher.app.ending import shown
from launcher.app.prepared_run import alone_plan
from launcher.base.errors import ConfigError, LauncherError
from launcher.base.units import format_duration
from launcher.contract.job import JobHandle
from launcher.contract.plan import Plan
from launcher.runs.record import write_baseline
from launcher.runs.store import RunDirectory, new_directory

Submit = Callable[[RunDirectory, Plan], JobHandle]
"""Submits a plan from its run directory."""


def settle_baseline(directory: RunDirectory, plan: Plan, submit: Submit) -> str:
    """Names the run on one device that this run is measured against; what is to be said of it.

    A run that is there already is taken, be it one that has not ended yet; else one is submitted.
    """
    if not is_to_be_found(directory, plan):
        return ""
    search = baseline_search(directory, plan)
    if (found := find_baseline(*search)) is not None:
        write_baseline(directory, found)
        return f"baseline: {shown(found)}, an earlier run of the same training on one device"
    if (found := coming_baseline(*search)) is not None:
        write_baseline(directory, found)
        return f"baseline: {shown(found)}, the same training on one device, which has not ended yet"
    return _submit_baseline(directory, plan, submit)


def _submit_baseline(directory: RunDirectory, plan: Plan, submit: Submit) -> str:
    """Submits the training on one device. That it cannot be is no fault of the run."""
    try:
        alone = alone_plan(plan)
        base = new_directory(alone.config.run, alone.config.name)
    except ConfigError as error:
        return f"no baseline: this training does not run on one device:\n{error}"
    try:
        handle = submit(base, alone)
    except LauncherError as error:
        shutil.rmtree(base.path)
        return f"no baseline: {error}"
    write_baseline(directory, base.path)
    predicted = format_duration(alone.schedule.step_s * alone.config.train.num_steps)
    return (
        f"baseline: the same training on one device, submitted as job {handle.id} in {shown(base.path)}; "
        f"it takes {predicted} by prediction. --no-baseline leaves it out."
    )
