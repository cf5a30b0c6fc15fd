"""The points of a sweep on this machine, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.app.baseline import baseline_search, find_baseline, is_to_be_found
from launcher.app.ending import say, shown
from launcher.app.launch import make_baseline
from launcher.app.starts import train
from launcher.app.sweep.points import Points, new_sweep, placed
from launcher.app.sweep.results import point_standing, read_outcomes
from launcher.app.sweep.store import Sweep
from launcher.app.sweep.summary import print_outcomes
from launcher.base.errors import JobError, LauncherError
from launcher.contract.job import JobScript, JobState
from launcher.contract.plan import Plan
from launcher.runs.facts import checkouts, environment_facts
from launcher.runs.failure import failure_line, failure_text
from launcher.runs.record import Origin, write_baseline, write_job
from launcher.runs.render import render
from launcher.runs.store import RunDirectory, new_directory
from launcher.runs.watch import StopRequest, stop_requests


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A point that is recorded and about to be started."""

    label: str
    directory: RunDirectory
    plan: Plan
    script: JobScript
    origin: Origin


@dataclass(kw_only=True)
class _Baselines:
    """One run on one device for all points that share it."""

    stop: StopRequest
    missing: set[str] = field(default_factory=set)
    """Fingerprints of baselines that cannot be had: nobody tries them for every point again."""
    has_failed: bool = False

    def settle(self, attempt: Attempt) -> None:
        """Names the baseline of a point: one that is there, or one that is made now."""
        directory, plan = attempt.directory, attempt.plan
        if not is_to_be_found(directory, plan):
            return
        places, mark = baseline_search(directory, plan)
        found = find_baseline(places, mark)
        if found is None and mark not in self.missing:
            try:
                found = make_baseline(plan, attempt.origin, self.stop)
            except JobError as error:
                self.has_failed = True
                print(error, file=sys.stderr)
        if found is None:
            self.missing.add(mark)
        else:
            write_baseline(directory, found)


def run_points(points: Points, *, wants_baseline: bool) -> int:
    """Runs the points of a new sweep; returns the exit code, as `run_attempts`.

    Records every point before the first starts, so that a change of the recipe reaches none.
    """
    sweep = new_sweep(points)
    facts, trees = environment_facts(), checkouts()
    attempts = []
    for item, stored in zip(points.planned, sweep.points, strict=True):
        plan = placed(item.plan, stored.directory.path)
        directory = new_directory(plan.config.run, plan.config.name)
        origin = Origin(recipe=points.recipe, overrides=item.point.overrides, facts=facts, checkouts=trees)
        script = render(plan, directory.path)
        write_job(directory, plan, script, origin)
        attempts.append(
            Attempt(label=stored.label, directory=directory, plan=plan, script=script, origin=origin)
        )
    return run_attempts(sweep, attempts, wants_baseline=wants_baseline)


def run_attempts(sweep: Sweep, attempts: Sequence[Attempt], *, wants_baseline: bool) -> int:
    """Runs points one after the other, those on one device first, and shows the table of the sweep.

    One that fails is told at once and ends no other. Returns the exit code: that of a request to stop,
    1 when a point failed, else 0.
    """
    order = sorted(attempts, key=lambda attempt: attempt.plan.world_size > 1)  # a baseline for the others
    has_failed = False
    with stop_requests() as stop:
        baselines = _Baselines(stop=stop)
        for number, attempt in enumerate(order, 1):
            if stop.signal is not None:
                break
            say(f"\n[{number}/{len(order)}] {attempt.label}, in {shown(attempt.directory.path)}")
            state = _run(attempt, baselines if wants_baseline else None, stop)
            has_failed |= _has_failed(attempt, state)
        say("")
        print_outcomes(sweep, read_outcomes(sweep))
        if stop.signal is not None:
            print(f"stopped by {stop.signal.name}: all ranks have ended.", file=sys.stderr)
            return stop.exit_code
    return 1 if has_failed or baselines.has_failed else 0


def _run(attempt: Attempt, baselines: _Baselines | None, stop: StopRequest) -> JobState:
    """One point from its baseline to its end, whatever it is."""
    directory = attempt.directory
    try:
        if baselines is not None:
            baselines.settle(attempt)
        if stop.signal is not None:
            return JobState(phase="cancelled")
        state = train(directory, attempt.plan, attempt.script, stop)
    except (LauncherError, OSError) as error:
        state = JobState(phase="failed", reason=str(error))
        directory.write_state(state)
    except BaseException:
        directory.write_status("failed")
        raise
    if _has_failed(attempt, state):
        print(failure_text(directory.path, state), file=sys.stderr, flush=True)
    elif state.phase == "failed":
        say(f"{failure_line(directory.path, state)}\nas its plan had warned")
    return state


def _has_failed(attempt: Attempt, state: JobState) -> bool:
    return point_standing(attempt.plan, attempt.directory, state) == "failed"
