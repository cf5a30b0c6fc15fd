"""What a pipeline's schedule promises beside what its ranks measured, for several runs in one table.

    bubble                idle share of the ranks' time, by the schedule's closed form
    messages              between stages, over all ranks of one replica, in one step
    microbatches held     per pp_rank, the most that wait for their backward at once, over its chunks;
                          measured: the most bytes that autograd held, over those of one microbatch
    first backward        per pp_rank, when its first B begins, from the start of the step; theory: by
                          simulation with the plan's times

What is measured comes from the records alone: no number of the plan but sizes (ranks, chunks, microbatches)
goes into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, median

from launcher.plan.columns import columns
from launcher.plan.model import Plan
from launcher.report.bubble import NS, bubble
from launcher.report.runs import Run
from launcher.schedule.actions import B
from launcher.schedule.planned import planned_timeline

Item = tuple[str, Plan, Run | None]
"""A label, what is to run, and what was measured of it, once it has run."""
_MESSAGE = "send_recv"


def claims(items: Sequence[Item]) -> list[str]:
    """The table of those plans that ask for it (`report.claims`); no line where none does."""
    asked = [item for item in items if item[1].config.report.claims]
    if not asked:
        return []
    steps = [
        ("point", "bubble", "measured", "messages", "measured", "layers of rank 0"),
        *((label, *_shares(plan, run), *_messages(plan, run), _layers(plan)) for label, plan, run in asked),
    ]
    ranks = [
        ("point", "held", "measured", "first backward", "measured"),
        *((label, *_held(plan, run), *_first_backwards(plan, run)) for label, plan, run in asked),
    ]
    return [
        "What the schedule promises, and what was measured",
        *(f"  {line}" for line in columns(steps)),
        "",
        "On each rank of the pipeline: microbatches held at once, and ms until the first backward",
        *(f"  {line}" for line in columns(ranks)),
    ]


def held_microbatches(run: Run) -> list[float] | None:
    """Measured: per pp_rank, the most that its fullest rank held for the backward, in microbatches of one
    of its chunks; None where that was not followed."""
    chunks = run.plan.pipeline.num_chunks * run.plan.batch.num_microbatches
    found: list[list[float]] = [[] for _ in range(run.plan.mesh.pp)]
    for header in run.records.headers:
        memory = run.records.memory.get(header.rank)
        if memory is None or not memory.held_peak_bytes or not memory.held_total_bytes:
            return None
        found[header.pp_rank].append(memory.held_peak_bytes * chunks / memory.held_total_bytes)
    return [max(values) for values in found]


def first_backwards_s(run: Run) -> list[float] | None:
    """Measured: per pp_rank, the median time of the first backward; None where it was not recorded."""
    found: list[list[int]] = [[] for _ in range(run.plan.mesh.pp)]
    for step in run.measured:
        for header, row in zip(run.records.headers, run.records.steps[step], strict=True):
            if row.first_backward_ns is None:
                return None
            found[header.pp_rank].append(row.first_backward_ns)
    return [median(times) * NS for times in found]


def num_messages(run: Run) -> float:
    """Measured: the mean of a step's messages between stages, over the ranks of one replica."""
    mesh = run.plan.mesh
    rows = [sum(row.num_receives for row in run.records.steps[step]) for step in run.measured]
    return mean(rows) / (mesh.num_ranks / mesh.pp)


def _shares(plan: Plan, run: Run | None) -> tuple[str, str]:
    formula, found = plan.schedule.bubble_formula, bubble(run) if run else None
    return (_percent(formula) if formula is not None else "", _percent(found.measured) if found else "")


def _messages(plan: Plan, run: Run | None) -> tuple[str, str]:
    planned = sum(row.count for row in plan.traffic if row.operation == _MESSAGE)
    return (str(planned), f"{num_messages(run):g}" if run else "")


def _held(plan: Plan, run: Run | None) -> tuple[str, str]:
    found = held_microbatches(run) if run else None
    planned = [str(part.peak_microbatches) for part in plan.memory]
    return (" ".join(planned), " ".join(f"{value:.1f}" for value in found or ()))


def _first_backwards(plan: Plan, run: Run | None) -> tuple[str, str]:
    found = first_backwards_s(run) if run else None
    return (_milliseconds(_planned_backwards_s(plan)), _milliseconds(found or ()))


def _planned_backwards_s(plan: Plan) -> Iterator[float]:
    for spans in planned_timeline(plan).spans:
        yield next(start for action, start, _ in spans if action.kind == B)


def _layers(plan: Plan) -> str:
    """Its layers, counted from 1.

    Chunks of one rank are apart: 16 layers on 4 ranks with 2 chunks give rank 0 the layers ``1-2, 9-10``.
    """
    spans = [(s.first_layer + 1, s.first_layer + s.num_layers) for s in plan.stages if s.pp_rank == 0]
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


def _milliseconds(seconds: Sequence[float] | Iterator[float]) -> str:
    return " ".join(f"{1000 * value:.0f}" for value in seconds)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
