"""The points of a sweep on this machine, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from launcher.app.baseline_run import Baseline, settle_baseline, train_baseline
from launcher.app.lifecycle import PreparedRun, train
from launcher.app.output import Output, shown
from launcher.app.sweep.point import Point
from launcher.app.sweep.prepare import PointRun
from launcher.app.sweep.store import Sweep
from launcher.app.sweep.summary import say_results
from launcher.base.errors import JobError, LauncherError
from launcher.contract.job import JobState
from launcher.contract.plan import Plan
from launcher.runs.failure import failure_line, failure_text
from launcher.runs.record import Origin
from launcher.runs.store import read_json
from launcher.runs.watch import StopRequest, stop_requests


def train_points(
    sweep: Sweep, runs: Sequence[PointRun], origin: Origin, output: Output, *, wants_baseline: bool
) -> int:
    """Trains points one after the other, those on one device first, and says what came of the sweep.

    One that fails is told at once and ends no other. Returns the exit code: that of a request to stop,
    1 when a point failed, else 0.
    """
    order = sorted(runs, key=lambda item: item[1].plan.world_size > 1)  # a baseline for the others
    has_failed = False
    with stop_requests() as stop:
        baselines = _Baselines(origin=origin, stop=stop, output=output)
        for number, (point, run) in enumerate(order, 1):
            if stop.signal is not None:
                break
            output.say(f"\n[{number}/{len(order)}] {point.label}, in {shown(run.directory.path)}")
            has_failed |= _train(point, run, baselines if wants_baseline else None, stop, output)
        output.say("")
        say_results(sweep, output)
        if stop.signal is not None:
            output.warn(f"stopped by {stop.signal.name}: all ranks have ended.")
            return stop.exit_code
    return 1 if has_failed or baselines.has_failed else 0


def _train(
    point: Point, run: PreparedRun, baselines: _Baselines | None, stop: StopRequest, output: Output
) -> bool:
    """One point from its baseline to its end; whether it has failed."""
    directory = run.directory
    try:
        if baselines is not None:
            baselines.settle(point, run)
        if stop.signal is not None:
            return False
        state = train(run, stop, output)
    except (LauncherError, OSError) as error:
        state = JobState(phase="failed", reason=str(error))
        directory.write_state(state)
    except BaseException:
        directory.write_status("failed")
        raise
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
    stop: StopRequest
    output: Output
    missing: set[str] = field(default_factory=set)
    """Fingerprints of baselines that cannot be had: nobody tries them for every point again."""
    has_failed: bool = False

    def settle(self, point: Point, run: PreparedRun) -> None:
        """Names the baseline of a point: one that is there, or one that is made now."""
        mark = read_json(run.directory.job)["fingerprint"]

        def make(alone: Plan) -> Baseline:
            if mark in self.missing:
                return Baseline()
            made = Baseline()
            try:
                origin = replace(self.origin, overrides=point.overrides)
                made = train_baseline(alone, origin, self.stop, self.output)
            except JobError as error:
                self.has_failed = True
                self.output.warn(str(error))
            if made.path is None:
                self.missing.add(mark)
            return made

        found = settle_baseline(run, make)
        if found.path is None and found.sentence and mark not in self.missing:
            self.missing.add(mark)
            self.output.say(found.sentence)
