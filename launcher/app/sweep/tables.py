"""A sweep as tables: what its points would do, which are refused and why, what they measured."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.app.output import text_width
from launcher.app.sweep.point import DONE, PlannedSweep, Point
from launcher.app.sweep.store import Sweep
from launcher.base.columns import columns, wrapped
from launcher.base.errors import Fault, LauncherError
from launcher.base.files import read_json
from launcher.base.units import counted, format_bytes, format_count, format_duration
from launcher.contract.job import JobState
from launcher.contract.plan import Plan
from launcher.report.bubble import bubble
from launcher.report.runs import Run, load_run, named_base, read_plan
from launcher.report.speedup import compare
from launcher.runs.state import current_states

_NO_BREAK = "\u00a0"
"""A space at which no line is broken."""
_ORIGINS = re.compile(r"\([^()]* from [^()]*\)")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_SAME_LOSS = 1e-3
"""Losses that are as near as this are those of one training."""


def speed_unit(plans: Sequence[Plan]) -> str:
    """What the speed of these plans is counted in; a sample that is no sequence is one token."""
    units = {plan.batch.unit for plan in plans}
    return units.pop() if len(units) == 1 else "tokens"


def planned_lines(planned: PlannedSweep) -> list[str]:
    """The number of points, the table of those that can run, and the refused ones."""
    count = len(planned.points) + len(planned.refused)
    found = [f"{planned.recipe}: {counted(count, 'point')} = {planned.dims}"]
    if planned.points:
        found += ["", f"{len(planned.points)} can run (predicted; memory is that of the fullest rank)"]
        found += predictions(planned.points)
    if planned.refused:
        found += ["", *refusals(planned.refused, text_width())]
    return found


def predictions(points: Sequence[Point]) -> list[str]:
    """The table of what the points would do."""
    plans = [point.plan for point in points]
    head = ("point", "nodes", "ranks", "step", f"{speed_unit(plans)}/s", "memory", "bubble")
    rows = [
        (
            *(point.label, str(plan.config.cluster.nodes), str(plan.world_size)),
            *(format_duration(plan.schedule.step_s), format_count(plan.predicted_speed)),
            format_bytes(max(part.total_bytes for part in plan.memory)),
            bubble_text(plan.schedule.bubble_simulated, plan),
        )
        for point, plan in zip(points, plans, strict=True)
    ]
    has_nodes = any(plan.config.cluster.nodes > 1 for plan in plans)
    has_pipeline = any(plan.mesh.pp > 1 for plan in plans)
    return _table([head, *rows], [True, has_nodes, True, True, True, True, has_pipeline])


def _table(rows: Sequence[Sequence[str]], shown: Sequence[bool], left: int = 1) -> list[str]:
    """Lines of the columns that are ``shown``, the first ``left`` of them aligned to the left."""
    kept = [column for column, is_shown in zip(zip(*rows, strict=True), shown, strict=True) if is_shown]
    return [f"  {line}" for line in columns(list(zip(*kept, strict=True)), left=left)]


def bubble_text(fraction: float | None, plan: Plan) -> str:
    """An idle share; empty where there is no pipeline."""
    return "" if fraction is None or plan.mesh.pp == 1 else f"{100 * fraction:.1f} %"


def refusals(refused: Sequence[Point], width: int) -> Iterator[str]:
    """How many points are refused; then each rule that they break, in its words for the first of them."""
    several = " (a point may break several rules)" if any(len(item.faults) > 1 for item in refused) else ""
    yield f"{len(refused)} refused{several}"
    rules = _by_rule(refused)
    size = len(str(max(len(labels) for _, labels in rules)))
    for fault, labels in rules:
        rule = str(Fault(fault.path, fault.given, fault.allowed))
        yield wrapped(f"  {len(labels):>{size}}  ", rule, width)
        whole = ", ".join(label.replace(" ", _NO_BREAK) for label in labels)
        yield wrapped(f"  {'':>{size}}  ", f"points: {whole}", width).replace(_NO_BREAK, " ")


def _by_rule(refused: Sequence[Point]) -> list[tuple[Fault, list[str]]]:
    """Every rule that is broken, as its first fault, and the labels of the points; the most points first."""
    found: dict[tuple[str, str], tuple[Fault, list[str]]] = {}
    for point in refused:
        for rule, fault in {(fault.path, _words(fault.allowed)): fault for fault in point.faults}.items():
            found.setdefault(rule, (fault, []))[1].append(point.label)
    return sorted(found.values(), key=lambda item: -len(item[1]))


def _words(rule: str) -> str:
    """A rule without what differs from point to point."""
    return _NUMBER.sub("N", _ORIGINS.sub("", rule))


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


def results_table(found: Sequence[Point], *, by: str = "speed") -> list[str]:
    """The table of the states and results of points, without the columns that say nothing of them; with that
    which they are ranked ``by``."""
    speed = f"{speed_unit([point.plan for point in found])}/s"
    head = ("point", "state", speed, "predicted", "speedup S", "efficiency E", "bubble", "predicted", "loss")
    is_done = all(point.state_text in DONE for point in found)
    has_bubble = any(point.plan.mesh.pp > 1 for point in found)
    has_speedup = any(point.speedup is not None for point in found)
    has_loss = by == "loss" or _differ(found)
    shown = [True, not is_done, True, True, has_speedup, has_speedup, has_bubble, has_bubble, has_loss]
    return _table([head, *map(_row, found)], shown, left=1 if is_done else 2)


def best_point(found: Sequence[Point], by: str) -> Point:
    """The point with the highest throughput, or the lowest final loss, of those that succeeded.

    Raises:
        LauncherError: when no point has been measured.
    """
    measured = [point for point in found if point.measured is not None]
    if not measured:
        raise LauncherError("no point of the sweep has succeeded yet, so none is the best")
    return max(measured, key=_speed) if by == "speed" else min(measured, key=_loss)


def rerun_command(recipe: str, point: Point) -> str:
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
        format_count(plan.predicted_speed),
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
