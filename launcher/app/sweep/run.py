"""Runs the points of a sweep, for the first time or again: here, or on a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.app.lifecycle import origin_of
from launcher.app.output import TERMINAL, Output, shown
from launcher.app.request import Request
from launcher.app.sweep.local import train_points
from launcher.app.sweep.planning import plan_sweep, starts_here
from launcher.app.sweep.point import Point
from launcher.app.sweep.prepare import new_sweep, recorded, recorded_again
from launcher.app.sweep.results import with_results
from launcher.app.sweep.store import Sweep
from launcher.app.sweep.submit import resubmit, say_scripts, submit_points
from launcher.app.sweep.tables import planned_lines
from launcher.base.errors import LauncherError
from launcher.base.units import counted
from launcher.runs.store import read_json

_TO_RETRY = ("failed", "cancelled", "not started")
NONE_CAN_RUN = 2


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """What came of starting the points of a sweep."""

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
    if not is_here:
        sweep = submit_points(planned, given, output)
        return _submitted(sweep, sweep.points)
    sweep, origin = new_sweep(planned, output), origin_of(given.recipe)
    runs = recorded(sweep, origin)
    code = train_points(sweep, runs, origin, output, wants_baseline=given.wants_baseline)
    return SweepRun(sweep=sweep, exit_code=code)


def retry_sweep(sweep: Sweep, given: Request, output: Output = TERMINAL) -> SweepRun:
    """Runs those points of a sweep again that failed or did not start; `given` says how, not what.

    Raises:
        LauncherError: when a point is still going, or none can be started.
    """
    points = [point for point in with_results(sweep) if point.state_text in _TO_RETRY]
    if not points:
        output.say(f"{shown(sweep.path)}: no point has failed or is left to start")
        return SweepRun(sweep=sweep, exit_code=0)
    output.say(f"{counted(len(points), 'point')} of {len(sweep.points)} again, in {shown(sweep.path)}")
    if not starts_here(points):
        resubmit(sweep, points, given, output)
        return _submitted(sweep, points)
    if given.at_once is not None:
        raise LauncherError("--at-once has no effect on a sweep on this machine: its points run one by one.")
    runs = recorded_again(points)
    for _, run in runs:
        run.directory.write_status("prepared")
    code = train_points(sweep, runs, origin_of(sweep.recipe), output, wants_baseline=given.wants_baseline)
    return SweepRun(sweep=sweep, exit_code=code)


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
    phases = [read_json(point.directory.status_file).get("phase") for point in points]
    return SweepRun(sweep=sweep, exit_code=int("failed" in phases))
