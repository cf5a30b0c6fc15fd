"""What is wrong with one record by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from launcher.contract.records import (
    COLLECTIVE_KINDS,
    PIPELINE,
    RANK_KINDS,
    EvalRecord,
    MemoryRecord,
    Part,
    RoleRecord,
    StepRecord,
    WindowRecord,
)

Later = Part | EvalRecord | MemoryRecord | RoleRecord
"""What follows a header."""


def problem_of(record: Later) -> str:
    """What is wrong with a record; empty when nothing is."""
    if isinstance(record, StepRecord):
        return step_problem(record)
    if isinstance(record, WindowRecord):
        return window_problem(record)
    return _eval_problem(record) if isinstance(record, EvalRecord) else _counts_problem(record)


def step_problem(record: StepRecord) -> str:
    """What is wrong with one step; empty when nothing is.

    The kinds must sum to the duration, and the calls of every collective to their kind.
    """
    times = (record.start_ns, record.duration_ns, record.first_backward_ns or 0)
    if not _are_counts((record.step, *times, record.num_receives, record.num_tokens, record.num_samples)):
        return f"step {record.step}: times and counts must be whole numbers of at least 0"
    if not record.num_tokens or not record.num_samples:
        return f"step {record.step}: a step trains at least 1 token of 1 sample"
    if not all(map(_is_number, (record.loss, record.grad_norm, record.lr))):
        return f"step {record.step}: loss, grad_norm and lr must be numbers or null"
    return _times_problem(record)


def window_problem(record: WindowRecord) -> str:
    """What is wrong with the sums of a window; empty when nothing is."""
    where = f"window of {record.num_steps} steps from {record.first_step}"
    kinds, shortest = record.kinds_ns, record.shortest_ns
    if not (isinstance(kinds, Mapping) and isinstance(shortest, Mapping) and _are_counts(record.compute_ns)):
        return f"{where}: kinds_ns, shortest_ns and compute_ns hold times"
    times = (
        record.start_ns,
        record.last_start_ns,
        record.last_duration_ns,
        record.duration_ns,
        record.own_ns,
    )
    counts = (record.first_step, record.num_steps, record.num_receives, record.num_tokens, record.num_samples)
    others = (record.num_losses, record.num_skipped, record.first_backward_ns or 0)
    known = [time for time in shortest.values() if time is not None]
    if not all(map(_are_counts, ((*times, *counts, *others), kinds.values(), known))):
        return f"{where}: times and counts must be whole numbers of at least 0"
    if not all((record.num_steps, record.num_tokens, record.num_samples)):
        return f"{where}: it has at least 1 step, 1 token and 1 sample"
    if not all(map(_is_number, (record.loss, record.disagreement, record.loss_sum))):
        return f"{where}: losses must be numbers or null"
    for name in (*kinds.keys() - set(RANK_KINDS), *shortest.keys() - {PIPELINE, *COLLECTIVE_KINDS}):
        return f"{where}: {name!r} is not a kind of time"
    if (total := sum(kinds.values())) != record.duration_ns:
        return f"{where}: the kinds sum to {total} ns, but the steps took {record.duration_ns} ns"
    for kind, time in shortest.items():
        if time is not None and time > kinds.get(kind, 0):
            return f"{where}: of {kinds.get(kind, 0)} ns in {kind} the shortest are {time} ns"
    return ""


def _times_problem(record: StepRecord) -> str:
    kinds, calls = record.kinds_ns, record.collectives_ns
    if not isinstance(kinds, Mapping) or not isinstance(calls, Mapping) or not _are_counts(record.compute_ns):
        return f"step {record.step}: kinds_ns, collectives_ns and compute_ns hold times"
    for name in (*kinds.keys() - set(RANK_KINDS), *calls.keys() - set(COLLECTIVE_KINDS)):
        return f"step {record.step}: {name!r} is not a kind of time"
    if not _are_counts(kinds.values()) or not all(map(_are_counts, calls.values())):
        return f"step {record.step}: times must be whole numbers of at least 0"
    total = sum(kinds.values())
    if total != record.duration_ns:
        return f"step {record.step}: the kinds sum to {total} ns, but the step took {record.duration_ns} ns"
    for axis in COLLECTIVE_KINDS:
        blocked, parts = kinds.get(axis, 0), sum(calls.get(axis, ()))
        if blocked != parts:
            return f"step {record.step}: the {axis} calls sum to {parts} ns, but {axis} took {blocked} ns"
    return ""


def _counts_problem(record: MemoryRecord | RoleRecord) -> str:
    fields = record.values if isinstance(record, RoleRecord) else vars(record)
    values = {key: value for key, value in fields.items() if key not in _NO_COUNTS and value is not None}
    is_whole = _are_counts(values.values())
    return "" if is_whole else f"{record.type}: {', '.join(values)} must be whole numbers of at least 0"


_NO_COUNTS = ("type", "time")


def _eval_problem(record: EvalRecord) -> str:
    if _are_counts((record.step, record.num_tokens)) and record.loss is not None and _is_number(record.loss):
        return ""
    return f"evaluation at step {record.step}: step and num_tokens must be whole numbers, loss a number"


def _are_counts(values: Any) -> bool:
    if not isinstance(values, Iterable) or isinstance(values, str):
        return False
    numbers = list(values)
    return set(map(type, numbers)) <= {int} and min(numbers, default=0) >= 0


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (int, float)
