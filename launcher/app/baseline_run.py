"""The baseline of a run that is about to start or was submitted: one that is stored, or one made for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.app.baseline import baseline_search, find_baseline, is_to_be_found
from launcher.app.lifecycle import PreparedRun, freeze_and_submit, prepared, train
from launcher.app.output import Output, shown
from launcher.app.prepared_run import alone_plan
from launcher.base.errors import ConfigError, JobError, LauncherError
from launcher.base.units import format_duration
from launcher.contract.plan import Plan
from launcher.runs.failure import failure_text
from launcher.runs.record import Origin, write_baseline
from launcher.runs.store import new_directory
from launcher.runs.watch import StopSignal


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What was settled of the run on one device that another is measured against."""

    path: Path | None = None
    """Its directory; None where there is none, or none is needed."""
    sentence: str = ""
    """What is to be said of it."""


def settle_baseline(run: PreparedRun, make: Callable[[Plan], Baseline]) -> Baseline:
    """Finds the baseline of a recorded run, or has it made, and names it in the run's directory.

    ``make`` trains this plan, or submits it: the same training on one device. Of a run that a scheduler has
    the baseline may be one that has not ended yet.
    """
    if not is_to_be_found(run.directory, run.plan):
        return Baseline()
    search = baseline_search(run.directory, run.plan)
    if (path := find_baseline(*search)) is not None:
        what = "an earlier run of the same training on one device"
        found = Baseline(path=path, sentence=f"baseline: {shown(path)}, {what}")
    elif not run.executor.is_local and (path := find_baseline(*search, has_ended=False)) is not None:
        what = "the same training on one device, which has not ended yet"
        found = Baseline(path=path, sentence=f"baseline: {shown(path)}, {what}")
    else:
        try:
            alone = alone_plan(run.plan)
        except ConfigError as error:
            return Baseline(sentence=f"no baseline: this training does not run on one device:\n{error}")
        found = make(alone)
    if found.path is not None:
        write_baseline(run.directory, found.path)
    return found


def train_baseline(alone: Plan, origin: Origin, stop: StopSignal, output: Output) -> Baseline:
    """Trains on one device, here and now.

    Raises:
        JobError: when that fails.
    """
    run = prepared(alone, new_directory(alone.config.run, alone.config.name))
    run.record(origin)
    path = run.directory.path
    output.say(f"baseline: the same training on one device, in {shown(path)}")
    state = train(run, stop, output)
    if state.phase == "failed":
        raise JobError(f"the baseline failed; --no-baseline runs without it\n{failure_text(path, state)}")
    return Baseline(path=path if state.phase == "succeeded" else None)


def submit_baseline(
    alone: Plan, origin: Origin, *, code: Path | None = None, after: str = "", untracked: tuple[str, ...] = ()
) -> Baseline:
    """Submits the training on one device. That it cannot be submitted is no fault of the run.

    ``code``: the directory whose frozen code it shares; None: it has its own copy.
    """
    try:
        directory = new_directory(alone.config.run, alone.config.name)
    except ConfigError as error:
        return Baseline(sentence=f"no baseline: {error}")
    run = PreparedRun(plan=alone, directory=directory, code=code or directory.path, after=after)
    try:
        handle, _ = freeze_and_submit(run, origin, untracked)
    except LauncherError as error:
        shutil.rmtree(directory.path)
        return Baseline(sentence=f"no baseline: {error}")
    predicted = format_duration(alone.schedule.step_s * alone.config.train.num_steps)
    return Baseline(
        path=directory.path,
        sentence=f"baseline: the same training on one device, submitted as job {handle.id} in "
        f"{shown(directory.path)}; it takes {predicted} by prediction. --no-baseline leaves it out.",
    )
