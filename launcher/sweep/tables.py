"""A sweep as tables: what its points would do, which are refused and why, what came of them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.errors import Fault
from launcher.plan.columns import columns
from launcher.plan.model import Plan
from launcher.units import counted, format_bytes, format_count, format_duration

_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A point that cannot run."""

    label: str
    overrides: tuple[str, ...]
    faults: tuple[Fault, ...]


def unit(plans: Sequence[Plan]) -> str:
    """What the speed of these plans is counted in: a user's own model has samples."""
    return "samples" if all(plan.config.model.family == "custom" for plan in plans) else "tokens"


def predicted_speed(plan: Plan) -> float:
    """Tokens (of a user's own model: samples) per second, by prediction."""
    return plan.batch.global_size * plan.batch.seq_length / plan.schedule.step_s


def predictions(items: Sequence[tuple[str, Plan]]) -> list[str]:
    """The table of what the points (label, plan) would do."""
    has_nodes = any(plan.config.cluster.nodes > 1 for _, plan in items)
    has_pipeline = any(plan.mesh.pp > 1 for _, plan in items)
    head = [
        "point",
        *(["nodes"] if has_nodes else []),
        *("ranks", "step", f"{unit([plan for _, plan in items])}/s", "memory"),
        *(["bubble"] if has_pipeline else []),
    ]
    rows = [head]
    for label, plan in items:
        rows.append(
            [
                label,
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


def refusals(refused: Sequence[Refusal], width: int) -> Iterator[str]:
    """Every refused point with its first reason, then the reasons counted by rule."""
    size = max(len(refusal.label) for refusal in refused)
    for refusal in refused:
        first, *others = refusal.faults
        more = f" (and {counted(len(others), 'other fault')})" if others else ""
        head = f"  {refusal.label:<{size}}  "
        yield _wrapped(head, f"{_rule(first)}{more}", width)
    counts = _by_rule(refused)
    if len(refused) > 1:
        yield ""
        yield "Refused by rule (a point may break several)"
    for number, fault in counts if len(refused) > 1 else ():
        yield _wrapped(f"  {number:>{len(str(counts[0][0]))}}  ", f"{fault.path}: {_shortest(fault)}", width)


def _by_rule(refused: Sequence[Refusal]) -> list[tuple[int, Fault]]:
    """How many points break each rule, the most first, with a fault that is an example of it."""
    found: dict[tuple[str, str], list[Fault]] = {}
    for refusal in refused:
        rules = {(fault.path, _NUMBER.sub("N", fault.allowed)): fault for fault in refusal.faults}
        for rule, fault in rules.items():
            found.setdefault(rule, []).append(fault)
    return sorted(((len(faults), faults[0]) for faults in found.values()), key=lambda item: -item[0])


def _rule(fault: Fault) -> str:
    return str(Fault(fault.path, fault.given, fault.allowed))


def _shortest(fault: Fault) -> str:
    return _rule(fault).partition(": ")[2]


def _wrapped(head: str, text: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
