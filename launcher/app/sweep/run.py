"""Runs the points of a sweep, for the first time or again: here one after the other, or on a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from launcher.app.baseline import Baseline, ensure_baseline, has_failed_baseline, train_baseline
from launcher.app.data import prepare_data
from launcher.app.lifecycle import (
    PreparedRun,
    failed_unless_ended,
    origin_of,
    removed_unless_begun,
    stopped_text,
    train,
)
from launcher.app.output import TERMINAL, Output, shown
from launcher.app.request import Request
from launcher.app.sweep.planning import PointRun, create_runs, new_sweep, plan_sweep, reset_runs, starts_here
from launcher.app.sweep.point import Point
from launcher.app.sweep.store import Sweep
from launcher.app.sweep.submit import resubmit, say_scripts, submit_points
from launcher.app.sweep.summary import say_results
from launcher.app.sweep.tables import planned_lines, with_results
from launcher.app.trust.check import check_recorded
from launcher.base.errors import JobError, LauncherError
from launcher.base.files import read_json
from launcher.base.units import counted
from launcher.contract.job import JobState
from launcher.contract.plan import Plan
from launcher.runs.failure import failure_line, failure_text
from launcher.runs.record import Origin
from launcher.runs.store import RunDirectory, hold, released
from launcher.runs.watch import StopSignal, stop_signals

NONE_CAN_RUN = 2
"""The exit code where no point can run."""
_TO_RETRY = ("failed", "cancelled", "not started")


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """The outcome of starting the points of a sweep."""

    sweep: Sweep | None
    """None: no point can run, or nothing was to be started."""
    exit_code: int
    """Of a process that did only this: 0 when every point has succeeded or was submitted, 1 when one failed
    or was refused, 2 when none can run, 128 and its number after a signal."""


def run_sweep(given: Request, output: Output = TERMINAL) -> SweepRun:
    """Runs every point that can run to its end, or submits them all.

    Raises:
        LauncherError: when none could be started.
    """
    planned = plan_sweep(given, starts=True)
    if not planned.points:
        output.say("\n".join(planned_lines(planned)))
        return SweepRun(sweep=None, exit_code=NONE_CAN_RUN)
    for point in planned.points:
        given.check(point.plan.config)
    is_here = starts_here(planned.points)
    if is_here:
        _check_local(given)
    if given.dry_run:
        if is_here:
            output.say("\n".join(planned_lines(planned)))
        else:
            say_scripts(planned, given, output)
        return SweepRun(sweep=None, exit_code=0)
    for point in planned.points:
        prepare_data(point.plan, output, is_here=is_here)
    if not is_here:
        sweep = submit_points(planned, given, output)
        return _submitted(sweep, sweep.points)
    sweep = new_sweep(planned, output)
    with released(hold(RunDirectory(sweep.path))):
        with removed_unless_begun(sweep.path):
            origin = origin_of(given.recipe)
            runs = create_runs(sweep, origin)
        code = train_points(sweep, runs, origin, output, wants_baseline=given.wants_baseline)
    return SweepRun(sweep=sweep, exit_code=code)


def retry_sweep(sweep: Sweep, given: Request, output: Output = TERMINAL) -> SweepRun:
    """Runs those points of a sweep again that failed or did not start, and the baseline of the others where
    that failed; `given` says how, not what.

    Raises:
        LauncherError: when the sweep or a point is still going, or none can be started.
    """
    with released(hold(RunDirectory(sweep.path), output.say)):
        return _retry(sweep, given, output)


def _retry(sweep: Sweep, given: Request, output: Output) -> SweepRun:
    found = with_results(sweep)
    points = [point for point in found if point.state_text in _TO_RETRY]
    lacking = _without_baseline(found) if given.wants_baseline else []
    if not points and not lacking:
        output.say(f"{shown(sweep.path)}: no point has failed or is left to start")
        return SweepRun(sweep=sweep, exit_code=0)
    check_recorded(sweep.path, [point.plan.config for point in points], given.allow)
    if points:
        output.say(f"{counted(len(points), 'point')} of {len(sweep.points)} again, in {shown(sweep.path)}")
    if lacking:
        output.say(f"the failed baseline of {counted(len(lacking), 'point')} again")
    if not starts_here([*points, *(point for point, _ in lacking)]):
        resubmit(sweep, points, lacking, given, output)
        return _submitted(sweep, points)
    if given.at_once is not None:
        raise LauncherError("--at-once has no effect on a sweep on this machine: its points run one by one.")
    runs = reset_runs(points, given, output)
    for _, run in runs:
        run.directory.write_status("prepared")
    code = train_points(
        sweep, runs, origin_of(sweep.recipe), output, wants_baseline=given.wants_baseline, lacking=lacking
    )
    return SweepRun(sweep=sweep, exit_code=code)


def _without_baseline(found: Sequence[Point]) -> list[PointRun]:
    """The points that have succeeded, and whose baseline failed."""
    done = [point for point in found if point.state_text == "succeeded"]
    runs = [(point, PreparedRun(plan=point.plan, directory=point.directory)) for point in done]
    return [item for item in runs if has_failed_baseline(item[1])]


def _check_local(given: Request) -> None:
    """Refuses what only a scheduler can do."""
    of_schedulers = {
        "at-once": given.at_once is not None,
        "require-clean": given.require_clean,
        "untracked": bool(given.untracked),
    }
    for flag, is_given in of_schedulers.items():
        if is_given:
            raise LauncherError(
                f"--{flag} has no effect on a sweep on this machine, whose points run one after the other."
            )


def _submitted(sweep: Sweep, points: Sequence[Point]) -> SweepRun:
    phases = [point.directory.status().phase for point in points]
    return SweepRun(sweep=sweep, exit_code=int("failed" in phases))


def train_points(
    sweep: Sweep,
    runs: Sequence[PointRun],
    origin: Origin,
    output: Output,
    *,
    wants_baseline: bool,
    lacking: Sequence[PointRun] = (),
) -> int:
    """Trains points one after the other, those on one device first, and then the baseline of those that are
    done and lack it, and says the results.

    A failure is reported at once and ends no other point. Returns the exit code: that of a request to stop,
    1 when a point failed, else 0.
    """
    output = replace(output, goes_on=True)
    order = sorted(runs, key=lambda item: item[1].plan.world_size > 1)  # a baseline for the others
    has_failed = False
    with stop_signals() as stop:
        baselines = _Baselines(origin=origin, stop=stop, output=output)
        for number, (point, run) in enumerate(order, 1):
            if stop.signal is not None:
                break
            output.say(f"\n[{number}/{len(order)}] {point.label}, in {shown(run.directory.path)}")
            has_failed |= _train(point, run, baselines if wants_baseline else None, stop, output)
        for point, run in lacking:
            if stop.signal is None:
                baselines.ensure(point, run)
        output.say("")
        say_results(sweep, output)
        if stop.signal is not None:
            output.warn(f"{stopped_text(stop.signal.name)}.")
            return stop.exit_code
    return 1 if has_failed or baselines.has_failed else 0


def _train(
    point: Point, run: PreparedRun, baselines: _Baselines | None, stop: StopSignal, output: Output
) -> bool:
    """One point from its baseline to its end; whether it has failed."""
    try:
        directory = hold(run.directory, output.say)
        run = replace(run, directory=directory)
        with failed_unless_ended(directory):
            try:
                if baselines is not None:
                    baselines.ensure(point, run)
                if stop.signal is not None:
                    return False
                state = train(run, stop, output)
            except (LauncherError, OSError) as error:
                state = JobState(phase="failed", reason=str(error))
                directory.write_state(state)
    except (LauncherError, OSError) as error:  # another one has its directory, or it cannot be written
        output.warn(str(error))
        return True
    has_failed = replace(point, has_started=True, state=state).state_text == "failed"
    if has_failed:
        output.warn(failure_text(directory.path, state))
    elif state.phase == "failed":
        output.say(f"{failure_line(directory.path, state)}\nas its plan had warned")
    return has_failed


@dataclass(kw_only=True)
class _Baselines:
    """One run on one device for all points that share it."""

    origin: Origin
    stop: StopSignal
    output: Output
    missing: set[str] = field(default_factory=set)
    """Fingerprints of baselines that cannot be had: nobody tries them for every point again."""
    has_failed: bool = False

    def ensure(self, point: Point, run: PreparedRun) -> None:
        """Names the baseline of a point: one that is there, or one that is made now."""
        fingerprint = read_json(run.directory.job)["fingerprint"]
        origin = replace(self.origin, overrides=point.overrides)

        def make(plan: Plan) -> Baseline:
            if fingerprint in self.missing:
                return Baseline()
            return train_baseline(plan, origin, self.stop, self.output)

        try:
            found = ensure_baseline(run, make)
        except JobError as error:
            self.has_failed = True
            self.missing.add(fingerprint)
            self.output.warn(str(error))
        else:
            if found.path is None and found.message:
                self.missing.add(fingerprint)
                self.output.say(found.message)
