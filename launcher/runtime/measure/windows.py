"""Folds the steps of a rank into sums, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from zlib import crc32

import torch
import torch.distributed as dist

from launcher.contract.heartbeat import PEERS
from launcher.contract.model.checkpoint import baseline_end
from launcher.contract.records import COLLECTIVE_KINDS, WINDOW_STEPS, StepRecord
from launcher.runtime.api import RankContext
from launcher.runtime.measure.fold import fold
from launcher.runtime.measure.records import RecordWriter


class StepWindows:
    """Writes the steps of a rank that trains, and their sums when a window ends."""

    def __init__(
        self,
        ctx: RankContext,
        writer: RecordWriter,
        first_step: int,
        p2p_latency_ns: int,
    ) -> None:
        self._ctx, self._writer = ctx, writer
        self._edges = (first_step + ctx.config.report.warmup_steps, baseline_end(ctx.config))
        """Steps that begin a window of their own: the first that is measured, and the first that a baseline
        does not have."""
        self._latency_ns = p2p_latency_ns
        self._rows: list[StepRecord] = []

    def write(self, row: StepRecord) -> None:
        """Writes a step. Collective over this rank's groups where it ends a window: all ranks are called with
        the same steps."""
        self._writer.write(row, until_window=True)
        self._rows.append(row)
        if (row.step + 1) % WINDOW_STEPS:
            return
        parts = groupby(self._rows, lambda row: sum(row.step >= edge for edge in self._edges))
        each = (list(rows) for _, rows in parts)
        windows = [fold(rows, self._shortest_ns(rows), self._latency_ns) for rows in each]
        self._writer.end_window(windows, row.step)
        self._rows = []

    def _shortest_ns(self, rows: Sequence[StepRecord]) -> dict[str, int | None]:
        """As in `WindowRecord`: what no rank can tell alone."""
        found: dict[str, int | None] = {}
        for kind in COLLECTIVE_KINDS:
            calls = [row.collectives_ns.get(kind, ()) for row in rows]
            group = getattr(self._ctx.groups, kind).handle
            if kind == "dp" and self._ctx.replicas is not None:  # they use no collectives: one may be gone
                group = None
            shortest = calls if group is None else self._over_group(calls, group)
            found[kind] = None if shortest is None else sum(map(sum, shortest))
        return found

    def _over_group(
        self, calls: Sequence[Sequence[int]], group: dist.ProcessGroup
    ) -> Sequence[Sequence[int]] | None:
        """The least over the members, call by call; None where they made different numbers of calls."""
        times = [time for step in calls for time in step]
        digest = crc32(repr([len(step) for step in calls]).encode())
        with self._ctx.clock.doing(PEERS):
            number, most, lowest, highest = self._least([len(times), -len(times), digest, -digest], group)
            if (number, lowest) != (-most, -highest):
                return None
            return [self._least(times, group)]

    def _least(self, values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
        if not values:
            return []
        least = torch.tensor(values, dtype=torch.int64, device=self._ctx.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        return [int(value) for value in least.tolist()]
