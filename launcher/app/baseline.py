"""The run on one device that a speedup is measured against: named, found among the stored runs, or made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.app.lifecycle import (
    PreparedRun,
    failed_unless_ended,
    freeze_and_submit,
    prepared,
    removed_unless_begun,
    train,
)
from launcher.app.output import Output, shown
from launcher.app.planning import one_device_plan
from launcher.base.errors import ConfigError, Fault, JobError, LauncherError
from launcher.base.files import read_json
from launcher.base.units import counted, format_duration
from launcher.contract.model.checkpoint import baseline_end, first_step
from launcher.contract.plan import Plan
from launcher.report.runs import named_base
from launcher.runs.failure import failure_text
from launcher.runs.record import Origin, write_baseline
from launcher.runs.state import current_state
from launcher.runs.store import SWEEP_FILE, RunDirectory, absolute, new_directory, released
from launcher.runs.watch import StopSignal

_ENDED_BADLY = ("failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The run on one device that another is measured against."""

    path: Path | None = None
    """Its directory; None where there is none, or none is needed."""
    message: str = ""
    """What is to be said of it."""


def ensure_baseline(run: PreparedRun, make: Callable[[Plan], Baseline]) -> Baseline:
    """Finds the baseline of a recorded run, or has it made, and names it in the run's directory.

    ``make`` trains this plan, or submits it: the same training on one device. Of a run that a scheduler has
    the baseline may be one that has not ended yet.

    Raises:
        ConfigError: when the one that ``report.baseline`` names has not finished.
    """
    setting = run.plan.config.report.baseline
    if setting not in ("auto", "none"):
        found = Baseline(path=named_baseline(setting))
    elif setting == "none" or run.plan.world_size == 1:
        found = Baseline()
    else:
        found = _stored_baseline(run) or _made_baseline(run.plan, make)
    if found.path is not None:
        write_baseline(run.directory, found.path)
    return found


def named_baseline(setting: str) -> Path:
    """The finished run that ``report.baseline`` names.

    Raises:
        ConfigError: when it is not the directory of a finished run.
    """
    path = absolute(setting)
    directory = RunDirectory(path)
    phase = directory.status().phase
    if phase != "succeeded":
        found = f"that run is {phase}" if directory.job.is_file() else "it is not a run directory"
        allowed = f"must be auto, none, or the directory of a finished run; {found}"
        raise ConfigError([Fault("report.baseline", setting, allowed, ways=({"report.baseline": "auto"},))])
    return path


def find_baseline(
    places: Sequence[Path], fingerprint: str, phases: Sequence[str] = ("succeeded",)
) -> Path | None:
    """The newest run on one rank with this fingerprint and one of these phases, in these folders or in
    sweeps there: one that has succeeded before others. One that is active counts where a scheduler has it."""
    found = []
    for directory in (directory for place in dict.fromkeys(places) for directory in _runs(place)):
        status = directory.status()
        is_done = status.phase == "succeeded"
        if status.phase in phases and (not status.is_active or directory.handle.is_file()):
            job = read_json(directory.job)
            if job.get("fingerprint") == fingerprint and job.get("world_size") == 1:
                found.append((is_done, status.changed, directory.path))
    return max(found)[-1] if found else None


def _runs(folder: Path) -> Iterator[RunDirectory]:
    """The runs in a folder, and those of the sweeps in it."""
    for path in folder.iterdir() if folder.is_dir() else ():
        yield from map(RunDirectory, path.iterdir() if (path / SWEEP_FILE).is_file() else [path])


def has_failed_baseline(run: PreparedRun) -> bool:
    """Whether a recorded run has no baseline because the training on one device failed, and has not been made
    again."""
    if run.plan.config.report.baseline != "auto" or run.plan.world_size == 1:
        return False
    named, fingerprint = named_base(run.directory.path), read_json(run.directory.job)["fingerprint"]
    if named is not None:
        return current_state(RunDirectory(named)).phase in _ENDED_BADLY
    return find_baseline(_places(run), fingerprint, _ENDED_BADLY) is not None


def _places(run: PreparedRun) -> tuple[Path, ...]:
    return absolute(run.plan.config.run.root), run.directory.path.parent


def _stored_baseline(run: PreparedRun) -> Baseline | None:
    places = _places(run)
    phases = ("succeeded",) if run.executor.is_local else ("succeeded", "pending", "running")
    path = find_baseline(places, read_json(run.directory.job)["fingerprint"], phases)
    if path is None:
        return None
    what = "the same training on one device, which has not ended yet"
    if RunDirectory(path).status().phase == "succeeded":
        what = "an earlier run of the same training on one device"
    return Baseline(path=path, message=f"baseline: {shown(path)}, {what}")


def _made_baseline(plan: Plan, make: Callable[[Plan], Baseline]) -> Baseline:
    try:
        on_one_device = one_device_plan(plan)
    except ConfigError as error:
        return Baseline(message=f"no baseline: this training does not run on one device:\n{error}")
    return make(on_one_device)


def train_baseline(plan: Plan, origin: Origin, stop: StopSignal, output: Output) -> Baseline:
    """Trains on one device, here and now.

    Raises:
        JobError: when that fails.
    """
    run = prepared(plan, new_directory(plan.config.run, plan.config.name))
    path = run.directory.path
    with failed_unless_ended(run.directory):
        with removed_unless_begun(path):
            run.record(origin)
        output.say(f"baseline: {_what(plan)}, in {shown(path)}")
        state = train(run, stop, output)
    if state.phase == "failed":
        raise JobError(f"the baseline failed; --no-baseline runs without it\n{failure_text(path, state)}")
    return Baseline(path=path if state.phase == "succeeded" else None)


def submit_baseline(
    plan: Plan, origin: Origin, *, code: Path | None = None, after: str = "", untracked: tuple[str, ...] = ()
) -> Baseline:
    """Submits the training on one device. That it cannot be submitted is no fault of the run.

    ``code``: the directory whose frozen code it shares; None: it has its own copy.
    """
    try:
        directory = new_directory(plan.config.run, plan.config.name)
    except ConfigError as error:
        return Baseline(message=f"no baseline: {error}")
    path = directory.path
    try:
        run = PreparedRun(plan=plan, directory=directory, code=code or path, after=after)
        with released(directory), removed_unless_begun(path):
            handle, _ = freeze_and_submit(run, origin, untracked)
    except LauncherError as error:
        return Baseline(message=f"no baseline: {error}")
    num_steps = plan.config.train.num_steps - first_step(plan.config.train)
    predicted = format_duration(plan.schedule.step_s * num_steps)
    return Baseline(
        path=path,
        message=f"baseline: {_what(plan)}, submitted as job {handle.id} in "
        f"{shown(path)}; it takes {predicted} by prediction. --no-baseline leaves it out.",
    )


def _what(plan: Plan) -> str:
    """What the baseline is, of which this is the plan."""
    config = plan.config
    is_part = config.train.num_steps == baseline_end(config)
    part = f", its first {counted(config.report.num_baseline_steps, 'step')}" if is_part else ""
    return f"the same training on one device{part}"
