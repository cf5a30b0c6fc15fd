"""What the runs of a sweep measured, beside what was predicted, as one table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.app.sweep.point import DONE, Point
from launcher.app.sweep.store import Sweep
from launcher.app.sweep.tables import bubble_text, predicted_speed, unit
from launcher.base.columns import columns
from launcher.base.errors import LauncherError
from launcher.base.units import format_count
from launcher.contract.job import JobState
from launcher.report.bubble import bubble
from launcher.report.runs import Run, load_run, named_base, read_plan
from launcher.report.speedup import compare
from launcher.runs.state import current_states
from launcher.runs.store import read_json

_SAME_LOSS = 1e-3
"""Losses that are as near as this are those of one training."""


def with_results(sweep: Sweep) -> list[Point]:
    """Every point with its plan, its state now, and what it measured. A scheduler is asked once for all.

    Raises:
        LauncherError: when a run directory is gone or damaged, or a scheduler gives no answer.
    """
    started = [point for point in sweep.points if not point.is_waiting]
    states = current_states([point.directory for point in started])
    by_index = {point.index: state for point, state in zip(started, states, strict=True)}
    bases = _bases(sweep)
    return [_with_result(point, by_index.get(point.index), bases) for point in sweep.points]


def _with_result(point: Point, state: JobState | None, bases: Mapping[str, Path]) -> Point:
    path = point.directory.path
    found = replace(point, planned=read_plan(path))
    if state is None:
        return found
    found = replace(found, has_started=True, state=state)
    if state.phase != "succeeded":
        return found
    base = bases.get(read_json(point.directory.job).get("fingerprint", ""))
    run, speedup, problem = _measured(path, base)
    return replace(found, measured=run, speedup=speedup, problem=problem)


def results(found: Sequence[Point]) -> list[str]:
    """The table of what came of points, without the columns that say nothing of them."""
    speed = f"{unit([point.plan for point in found])}/s"
    head = ("point", "state", speed, "predicted", "speedup S", "efficiency E", "bubble", "predicted", "loss")
    kept = list(zip(*[head, *map(_row, found)], strict=True))
    has_bubble = any(point.plan.mesh.pp > 1 for point in found)
    has_speedup = any(point.speedup is not None for point in found)
    shown = [True, True, True, True, has_speedup, has_speedup, has_bubble, has_bubble, _differ(found)]
    kept = [column for column, is_shown in zip(kept, shown, strict=True) if is_shown]
    is_done = all(point.state_text in DONE for point in found)
    if is_done:
        kept = [column for column in kept if column[0] != "state"]
    lines = columns(list(zip(*kept, strict=True)), left=1 if is_done else 2)
    return [f"  {line}" for line in lines]


def best(found: Sequence[Point], by: str) -> Point:
    """The fastest point that has succeeded, or the one of the lowest loss in the end.

    Raises:
        LauncherError: when no point has been measured.
    """
    measured = [point for point in found if point.measured is not None]
    if not measured:
        raise LauncherError("no point of the sweep has succeeded yet, so none is the best")
    return max(measured, key=_speed) if by == "speed" else min(measured, key=_loss)


def command(recipe: str, point: Point) -> str:
    """The command that runs a point alone, in a directory of its own: that of the sweep is taken."""
    verb = "submit" if point.directory.handle.is_file() else "run"
    words = [word for word in point.overrides if word.lstrip("+").partition("=")[0] != "run.dir"]
    return shlex.join(("trireme", verb, recipe, *words))


def _differ(found: Sequence[Point]) -> bool:
    """Whether the points learnt differently, and not only added up in another order."""
    losses = [_loss(point) for point in found if point.measured is not None]
    return bool(losses) and max(losses) - min(losses) > _SAME_LOSS


def _speed(point: Point) -> float:
    assert point.measured is not None, "only measured points are compared"
    return point.measured.work.tokens_per_s


def _loss(point: Point) -> float:
    assert point.measured is not None, "only measured points are compared"
    final = point.measured.final_loss
    return final.loss if final else float("inf")


def _row(point: Point) -> tuple[str, ...]:
    plan, run = point.plan, point.measured
    found = bubble(run) if run else None
    final = run.final_loss if run else None
    return (
        point.label,
        point.state_text,
        format_count(run.work.tokens_per_s) if run else "",
        format_count(predicted_speed(plan)),
        f"{point.speedup:.2f}" if point.speedup is not None else "",
        f"{100 * point.speedup / run.work.num_devices:.0f} %" if run and point.speedup is not None else "",
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
