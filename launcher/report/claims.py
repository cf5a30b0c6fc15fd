"""What a pipeline's schedule promises beside what its ranks measured, for several runs.

    bubble                idle share of the ranks' time, by the schedule's closed form
    idle                  the same in time: the mean over the ranks, in one step
    messages              between stages, over all ranks of one replica, in one step
    microbatches held     per pp_rank, the most that wait for their backward at once, over its chunks;
                          measured: the most bytes that autograd held, and products that were put off, over
                          those of one microbatch
    first backward        per pp_rank, when its first B begins, from the start of the step; theory: by
                          simulation with the plan's times
    memory                per pp_rank, at its fullest; measured: live tensors before the update, batches
                          read ahead among them, and what autograd held; beside them how much the resident
                          memory of the process grew

What is measured comes from the records alone: no number of the plan but sizes (ranks, chunks, microbatches)
goes into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.base.arithmetic import weighted_median
from launcher.base.columns import columns, wrapped
from launcher.base.units import format_percent
from launcher.contract.actions import B
from launcher.contract.plan import Plan
from launcher.contract.records import MemoryRecord
from launcher.report.bubble import NS, bubble
from launcher.report.runs import Run
from launcher.schedule.simulate import planned_timeline

_MESSAGE = "send_recv"


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A plan, and what came of it."""

    label: str
    plan: Plan
    run: Run | None
    """What was measured of it, once it has run."""
    end: str
    """How it ended, or stands."""


def claims(
    promises: Sequence[Promise],
    refused: Sequence[tuple[str, str]] = (),
    *,
    width: int = 100,
    room: int | None = None,
) -> list[str]:
    """The tables of those plans that ask for them (`report.claims`); no line where none does.

    ``refused``: label and reason of what could not be planned beside them; ``width``: that of the reasons;
    ``room``: columns of the terminal, where a table that is wider has its labels on lines of their own.
    """
    asked = [promise for promise in promises if promise.plan.config.report.claims]
    if not asked:
        return []
    steps = [
        ("point", "bubble", "measured", "idle ms", "measured", "messages", "measured", "layers of rank 0"),
        *((p.label, *_bubbles(p), *_messages(p), _layers(p.plan)) for p in asked),
    ]
    ranks = [
        ("point", "held", "measured", "first backward", "measured"),
        *((p.label, *_held(p), *_first_backwards(p)) for p in asked),
    ]
    memory = [
        ("point", "planned", "counted", "process grew", "limit", "plan", "run"),
        *((p.label, *_memory(p), *_verdicts(p)) for p in asked),
        *((label, "", "", "", "", "refuses", "") for label, _ in refused),
    ]
    return [
        "What the schedule promises, and what was measured of a step",
        *_table(steps, room),
        "",
        "On each rank of the pipeline: microbatches held at once, and ms until the first backward",
        *_table(ranks, room),
        "",
        "MB of each rank: planned; counted, as tensors alive before the update (batches read ahead, too)",
        "and the most that autograd held; and what its process grew by in training. Then the limit, what",
        "the plan says, and what came of it",
        *_table(memory, room),
        *(wrapped("    ", f"{label}: {reason}", width) for label, reason in refused),
    ]


def held_microbatches(run: Run) -> list[float] | None:
    """Measured: per pp_rank, the most that its fullest rank held for the backward, in microbatches of one
    of its chunks; None where that was not followed."""
    chunks = run.plan.pipeline.num_chunks * run.plan.batch.num_microbatches

    def held(memory: MemoryRecord) -> float | None:
        if memory.held_peak_bytes is None or memory.held_total_bytes is None:
            return None
        return memory.held_peak_bytes * chunks / max(1, memory.held_total_bytes)

    return _fullest(run, held)


def counted_bytes(run: Run) -> list[float] | None:
    """Measured: per pp_rank, live tensors before the update and the most that autograd held, of the fullest
    rank; None where that was not followed."""

    def counted(memory: MemoryRecord) -> float | None:
        return None if memory.held_peak_bytes is None else memory.states_bytes + memory.held_peak_bytes

    return _fullest(run, counted)


def grown_bytes(run: Run) -> list[float] | None:
    """Measured: per pp_rank, the most that the resident memory of a process grew by since the model was
    built; None where that is not the memory of the device."""
    return _fullest(run, lambda memory: memory.grown_bytes)


def first_backwards_s(run: Run) -> list[float] | None:
    """Measured: per pp_rank, the median time of the first backward; None where it was not recorded."""
    found: list[list[tuple[float, int]]] = [[] for _ in range(run.plan.mesh.pp)]
    for rows in run.measured:
        for header, row in zip(run.records.headers, rows, strict=True):
            if row.first_backward_ns is None:
                return None
            found[header.pp_rank].append((row.first_backward_ns, row.num_steps))
    return [weighted_median(times) * NS for times in found]


def num_messages(run: Run) -> float:
    """Measured: the mean of a step's messages between stages, over the ranks of one replica."""
    mesh = run.plan.mesh
    total = sum(row.num_receives for rows in run.measured for row in rows)
    return total / run.work.num_steps / (mesh.num_ranks / mesh.pp)


def _fullest(run: Run, of: Callable[[MemoryRecord], float | None]) -> list[float] | None:
    """The largest number of each pp_rank; None where one is not known."""
    found: list[list[float]] = [[] for _ in range(run.plan.mesh.pp)]
    for header in run.records.headers:
        memory = run.records.memory.get(header.rank)
        value = None if memory is None else of(memory)
        if value is None:
            return None
        found[header.pp_rank].append(value)
    return [max(values) for values in found]


def _bubbles(promise: Promise) -> tuple[str, str, str, str]:
    """The idle share, and the idle time: planned and measured."""
    formula, found = promise.plan.schedule.bubble_formula, bubble(promise.run) if promise.run else None
    share = idle = ""
    if formula is not None:
        share = format_percent(formula)
        idle = _milliseconds([_work_s(promise.plan) * formula / (1 - formula)])
    measured = (format_percent(found.measured), _milliseconds([found.idle_s])) if found else ("", "")
    return share, measured[0], idle, measured[1]


def _work_s(plan: Plan) -> float:
    """Planned seconds of compute of a rank in a step, the mean over the ranks."""
    schedule = plan.schedule
    each = sum(schedule.forward_s) + sum(schedule.backward_s) + sum(schedule.weight_s)
    return each * plan.batch.num_microbatches / plan.mesh.pp


def _messages(promise: Promise) -> tuple[str, str]:
    planned = sum(row.count for row in promise.plan.traffic if row.operation == _MESSAGE)
    return (str(planned), f"{num_messages(promise.run):g}" if promise.run else "")


def _held(promise: Promise) -> tuple[str, str]:
    found = held_microbatches(promise.run) if promise.run else None
    planned = [str(part.peak_microbatches) for part in promise.plan.memory]
    return (" ".join(planned), " ".join(f"{value:.1f}" for value in found or ()))


def _first_backwards(promise: Promise) -> tuple[str, str]:
    found = first_backwards_s(promise.run) if promise.run else None
    ranks = planned_timeline(promise.plan).spans
    planned = [next(start for action, start, _ in spans if action.kind == B) for spans in ranks]
    return (_milliseconds(planned), _milliseconds(found or ()))


def _memory(promise: Promise) -> tuple[str, str, str]:
    run, planned = promise.run, [part.total_bytes for part in promise.plan.memory]
    counted, grown = (counted_bytes(run), grown_bytes(run)) if run else (None, None)
    return (_megabytes(planned), _megabytes(counted or ()), _megabytes(grown or ()))


def _verdicts(promise: Promise) -> tuple[str, str, str]:
    """The limit, what the plan says of it, and how the run ended."""
    plan = promise.plan
    limit = _megabytes([plan.config.device.memory_bytes])
    return (limit, "passes" if plan.fits else "warns", promise.end)


def _layers(plan: Plan) -> str:
    """Its layers, counted from 1.

    Chunks of one rank are apart: 16 layers on 4 ranks with 2 chunks give rank 0 the layers ``1-2, 9-10``.
    """
    spans = [(s.first_layer + 1, s.first_layer + s.num_layers) for s in plan.stages if s.pp_rank == 0]
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


def _table(rows: Sequence[Sequence[str]], room: int | None) -> list[str]:
    lines = [f"  {line}" for line in columns(rows)]
    if room is None or max(map(len, lines)) <= room:
        return lines
    numbers = columns([row[1:] for row in rows], left=0)
    return [line for row, rest in zip(rows, numbers, strict=True) for line in (f"  {row[0]}", f"    {rest}")]


def _milliseconds(seconds: Sequence[float]) -> str:
    return " ".join(f"{1000 * value:.0f}" for value in seconds)


def _megabytes(sizes: Sequence[float]) -> str:
    return " ".join(f"{size / 1e6:.0f}" for size in sizes)
