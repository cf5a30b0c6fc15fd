"""A sweep on its way to its first start: its directory, and in it a recorded run for every point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.app.lifecycle import PreparedRun
from launcher.app.output import Output, shown, text_width
from launcher.app.sweep.point import PlannedSweep, Point
from launcher.app.sweep.store import Sweep, make_sweep, ready_again
from launcher.app.sweep.tables import refusals
from launcher.base.units import counted
from launcher.runs.record import Origin
from launcher.runs.store import new_directory

PointRun = tuple[Point, PreparedRun]
"""A point and its run, which is about to start."""


def new_sweep(planned: PlannedSweep, output: Output) -> Sweep:
    """Makes the directory of a sweep and says what it is.

    Raises:
        ConfigError: when it cannot be made.
    """
    sweep = make_sweep(planned)
    for note in planned.notes:
        output.say(f"note: {note}")
    if planned.refused:
        output.say("\n".join(refusals(planned.refused, text_width())) + "\n")
    num_points = len(planned.points)
    count = counted(num_points + len(planned.refused), "point")
    output.say(f"{num_points} of {count} to run = {planned.dims}, in {shown(sweep.path)}")
    return sweep


def recorded(sweep: Sweep, origin: Origin, code: Path | None = None) -> list[PointRun]:
    """Every point with its run, all recorded before the first starts: a change of the recipe reaches none.

    ``code``: the directory that holds their frozen code; None: they run the code that is installed.
    """
    runs = []
    for point in sweep.points:
        config = point.plan.config
        run = PreparedRun(plan=point.plan, directory=new_directory(config.run, config.name), code=code)
        run.record(replace(origin, overrides=point.overrides))
        runs.append((point, run))
    return runs


def recorded_again(points: Sequence[Point], code: Path | None = None) -> list[PointRun]:
    """Points that were started before with their runs: they go on from what is saved.

    Raises:
        JobError: when one is still going.
    """
    runs = []
    for point in points:
        resume = ready_again(point.directory, point.plan.config.train.num_steps)
        run = PreparedRun(plan=point.plan, directory=point.directory, code=code, resume=resume)
        run.record_script()
        runs.append((point, run))
    return runs
