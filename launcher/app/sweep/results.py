"""What the runs of a sweep measured, beside what was predicted, as one table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.app.sweep.store import Sweep
from launcher.app.sweep.tables import bubble_text, predicted_speed, unit
from launcher.base.columns import columns
from launcher.base.errors import LauncherError
from launcher.base.units import format_count
from launcher.contract.job import JobState
from launcher.contract.plan import Plan
from launcher.report.bubble import bubble
from launcher.report.runs import Run, load_run, named_base, read_plan
from launcher.report.speedup import compare
from launcher.runs.failure import out_of_memory_ranks
from launcher.runs.handle import standings
from launcher.runs.store import RunDirectory, read_json

_SAME_LOSS = 1e-3
"""Losses that are as near as this are those of one training."""
Standing = Literal[
    "not started", "pending", "running", "succeeded", "out of memory as planned", "failed", "cancelled"
]
DONE: tuple[Standing, ...] = ("succeeded", "out of memory as planned")
"""How points stand that came to what they were for."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one point."""

    label: str
    overrides: tuple[str, ...]
    directory: RunDirectory
    plan: Plan
    state: JobState
    has_started: bool
    run: Run | None
    """What it measured, once it has succeeded."""
    speedup: float | None
    problem: str
    """Why there is no measure, or no speedup, of a run that succeeded."""

    @property
    def standing(self) -> Standing:
        """How it stands, in a word or two."""
        return point_standing(self.plan, self.directory, self.state) if self.has_started else "not started"


def point_standing(plan: Plan, directory: RunDirectory, state: JobState) -> Standing:
    """How a point stands that was started. One that is to show what its plan promises (`report.claims`) has
    not failed where it ended out of memory, as that plan had warned."""
    if state.phase == "failed" and plan.config.report.claims and not plan.fits:
        return "out of memory as planned" if out_of_memory_ranks(directory.path) else "failed"
    return state.phase


def outcomes(sweep: Sweep, plans: Sequence[Plan], states: Sequence[JobState | None]) -> list[Outcome]:
    """What came of every point; a state of None is that of a run that was not started."""
    bases = _bases(sweep)
    found = []
    for point, plan, state in zip(sweep.points, plans, states, strict=True):
        run, speedup, problem = None, None, ""
        if state is not None and state.phase == "succeeded":
            mark = read_json(point.directory.job).get("fingerprint", "")
            run, speedup, problem = _measured(point.directory.path, bases.get(mark))
        outcome = Outcome(
            label=point.label,
            overrides=point.overrides,
            directory=point.directory,
            plan=plan,
            state=state or JobState(phase="pending"),
            has_started=state is not None,
            run=run,
            speedup=speedup,
            problem=problem,
        )
        found.append(outcome)
    return found


def read_outcomes(sweep: Sweep) -> list[Outcome]:
    """How every point stands now, and what it measured. A scheduler is asked once for all of them.

    Raises:
        LauncherError: when a run directory is gone or damaged, or a scheduler gives no answer.
    """
    directories = [point.directory for point in sweep.points]
    plans = [read_plan(directory.path) for directory in directories]
    waiting = [is_waiting(directory) for directory in directories]
    states = iter(standings([d for d, waits in zip(directories, waiting, strict=True) if not waits]))
    return outcomes(sweep, plans, [None if waits else next(states) for waits in waiting])


def is_waiting(directory: RunDirectory) -> bool:
    """Whether a point is recorded and nobody has started it yet."""
    return read_json(directory.status_file).get("phase") == "prepared"


def results(found: Sequence[Outcome]) -> list[str]:
    """The table of the outcomes, without the columns that say nothing of these points."""
    speed = f"{unit([outcome.plan for outcome in found])}/s"
    head = ("point", "state", speed, "predicted", "speedup S", "efficiency E", "bubble", "predicted", "loss")
    kept = list(zip(*[head, *map(_row, found)], strict=True))
    has_bubble = any(outcome.plan.mesh.pp > 1 for outcome in found)
    has_speedup = any(outcome.speedup is not None for outcome in found)
    shown = [True, True, True, True, has_speedup, has_speedup, has_bubble, has_bubble, _differ(found)]
    kept = [column for column, is_shown in zip(kept, shown, strict=True) if is_shown]
    is_done = all(outcome.standing in DONE for outcome in found)
    if is_done:
        kept = [column for column in kept if column[0] != "state"]
    lines = columns(list(zip(*kept, strict=True)), left=1 if is_done else 2)
    return [f"  {line}" for line in lines]


def best(found: Sequence[Outcome], by: str) -> Outcome:
    """The fastest point that has succeeded, or the one of the lowest loss in the end.

    Raises:
        LauncherError: when no point has been measured.
    """
    measured = [outcome for outcome in found if outcome.run is not None]
    if not measured:
        raise LauncherError("no point of the sweep has succeeded yet, so none is the best")
    return max(measured, key=_speed) if by == "speed" else min(measured, key=_loss)


def command(recipe: str, outcome: Outcome) -> str:
    """The command that runs a point alone, in a directory of its own: that of the sweep is taken."""
    verb = "submit" if outcome.directory.handle.is_file() else "run"
    words = [word for word in outcome.overrides if word.lstrip("+").partition("=")[0] != "run.dir"]
    return shlex.join(("trireme", verb, recipe, *words))


def _differ(found: Sequence[Outcome]) -> bool:
    """Whether the points learnt differently, and not only added up in another order."""
    losses = [_loss(outcome) for outcome in found if outcome.run is not None]
    return bool(losses) and max(losses) - min(losses) > _SAME_LOSS


def _speed(outcome: Outcome) -> float:
    assert outcome.run is not None, "only measured points are compared"
    return outcome.run.work.tokens_per_s


def _loss(outcome: Outcome) -> float:
    assert outcome.run is not None, "only measured points are compared"
    final = outcome.run.final_loss
    return final.loss if final else float("inf")


def _row(outcome: Outcome) -> tuple[str, ...]:
    plan, run = outcome.plan, outcome.run
    found = bubble(run) if run else None
    final = run.final_loss if run else None
    return (
        outcome.label,
        outcome.standing,
        format_count(run.work.tokens_per_s) if run else "",
        format_count(predicted_speed(plan)),
        f"{outcome.speedup:.2f}" if outcome.speedup is not None else "",
        f"{100 * outcome.speedup / run.work.num_devices:.0f} %"
        if run and outcome.speedup is not None
        else "",
        bubble_text(found.measured, plan) if found else "",
        bubble_text(plan.schedule.bubble_simulated, plan),
        f"{final.loss:.4f}" if final else "",
    )


def _bases(sweep: Sweep) -> dict[str, Path]:
    """The baselines of the sweep by fingerprint: those of its runs on one device are the same."""
    found = {}
    for point in sweep.points:
        path = point.directory.path
        if (base := named_base(path)) is not None:
            found[read_json(point.directory.job).get("fingerprint", "")] = base
    return found


def _measured(path: Path, base: Path | None) -> tuple[Run | None, float | None, str]:
    """The run, its speedup, and why one of the two is missing."""
    try:
        if base is not None and base.resolve() == path.resolve():
            return load_run(path), 1.0, ""
        pair = compare([path], base).results[0].median
        return pair.run, pair.speedup, ""
    except LauncherError as error:
        problem = str(error)
    try:
        return load_run(path), None, problem
    except LauncherError as error:
        return None, None, str(error)
