"""The sums of the steps of a window; without torch, so that they are checked by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median

from launcher.contract.records import PIPELINE, StepRecord, WindowRecord


def fold(
    rows: Sequence[StepRecord], shortest_ns: Mapping[str, int | None], p2p_latency_ns: int
) -> WindowRecord:
    """The sums of steps that follow each other. ``shortest_ns``: of the collectives, as in `WindowRecord`."""
    first, last = rows[0], rows[-1]
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds.update(row.kinds_ns)
    messages = sum(min(row.kinds_ns.get(PIPELINE, 0), row.num_receives * p2p_latency_ns) for row in rows)
    losses = [row.loss for row in rows if row.loss is not None and isfinite(row.loss)]
    backwards = [row.first_backward_ns for row in rows if row.first_backward_ns is not None]
    return WindowRecord(
        first_step=first.step,
        num_steps=len(rows),
        start_ns=first.start_ns,
        last_start_ns=last.start_ns,
        last_duration_ns=last.duration_ns,
        duration_ns=sum(row.duration_ns for row in rows),
        kinds_ns=dict(kinds),
        shortest_ns={**shortest_ns, PIPELINE: messages},
        num_receives=sum(row.num_receives for row in rows),
        compute_ns=tuple(
            round(median(times)) for times in zip(*(row.compute_ns for row in rows), strict=True)
        ),
        num_tokens=sum(row.num_tokens for row in rows),
        num_samples=sum(row.num_samples for row in rows),
        loss=last.loss,
        disagreement=last.disagreement,
        loss_sum=sum(losses),
        num_losses=len(losses),
        first_backward_ns=round(median(backwards)) if len(backwards) == len(rows) else None,
        own_ns=round(median(row.own_ns for row in rows)),
        num_skipped=sum(row.num_skipped for row in rows),
    )
