"""A sweep as tables: what its points would do, which are refused and why, what came of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from launcher.app.output import text_width
from launcher.app.sweep.point import PlannedSweep, Point
from launcher.base.columns import columns, wrapped
from launcher.base.errors import Fault
from launcher.base.units import counted, format_bytes, format_count, format_duration
from launcher.contract.plan import Plan

_NO_BREAK = "\u00a0"
"""A space at which no line is broken."""
_ORIGINS = re.compile(r"\([^()]* from [^()]*\)")
_NUMBER = re.compile(r"\d+(\.\d+)?")


def unit(plans: Sequence[Plan]) -> str:
    """What the speed of these plans is counted in: a user's own model has samples."""
    return "samples" if all(plan.config.model.family == "custom" for plan in plans) else "tokens"


def predicted_speed(plan: Plan) -> float:
    """Tokens (of a user's own model: samples) per second, by prediction."""
    return plan.batch.global_size * plan.batch.seq_length / plan.schedule.step_s


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
    has_nodes = any(plan.config.cluster.nodes > 1 for plan in plans)
    has_pipeline = any(plan.mesh.pp > 1 for plan in plans)
    head = [
        "point",
        *(["nodes"] if has_nodes else []),
        *("ranks", "step", f"{unit(plans)}/s", "memory"),
        *(["bubble"] if has_pipeline else []),
    ]
    rows = [head]
    for point, plan in zip(points, plans, strict=True):
        rows.append(
            [
                point.label,
                *([str(plan.config.cluster.nodes)] if has_nodes else []),
                *(str(plan.world_size), format_duration(plan.schedule.step_s)),
                format_count(predicted_speed(plan)),
                format_bytes(max(part.total_bytes for part in plan.memory)),
                *([bubble_text(plan.schedule.bubble_simulated, plan)] if has_pipeline else []),
            ]
        )
    return [f"  {line}" for line in columns(rows)]


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
