"""Collectives of the tensor-parallel ranks, and the mappings into and out of a tensor-parallel region."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.runtime.api import RankContext
from launcher.runtime.model.selective_recompute import in_backward, saving_instead_of

_SEQUENCE = 1
"""The dim of the sequence in [batch, seq, hidden]."""


class TensorParallelGroup:
    """Collectives of the tensor-parallel group; every call is timed as ``tp``."""

    def __init__(self, ctx: RankContext, *, splits_sequence: bool) -> None:
        self.rank, self.size = ctx.groups.tp.rank, ctx.groups.tp.size
        self.splits_sequence = splits_sequence
        self.saves_shard = splits_sequence and self.size > 1
        """Whether a region saves only this rank's part of its input, at the cost of one more all-gather."""
        self._group = ctx.groups.tp.handle
        self._clock = ctx.clock

    def all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor:
        """``x`` over all ranks, written into ``x``."""
        reduction = dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM
        if self.size > 1:
            with self._clock.section("tp"):
                dist.all_reduce(x, reduction, self._group)
        return x

    def all_gather_sequence(self, x: Tensor) -> Tensor:
        """[batch, seq / tp, hidden] of each rank -> [batch, seq, hidden] on all."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._clock.section("tp"):
            dist.all_gather(parts, x, self._group)
        return torch.cat(parts, _SEQUENCE)

    def reduce_scatter_sequence(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] of each rank -> this rank's [batch, seq / tp, hidden] of their sum."""
        if self.size == 1:
            return x
        parts = [part.contiguous() for part in x.chunk(self.size, _SEQUENCE)]
        out = torch.empty_like(parts[self.rank])
        with self._clock.section("tp"):
            dist.reduce_scatter(out, parts, group=self._group)
        return out


def copy_to_region(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """[batch, seq(local), hidden] -> [batch, seq, hidden], whole on each rank: into the region. The gradient
    of ``x`` is summed: each rank computes it for its own slice of the weights."""
    out: Tensor = _Region.apply(x, group, True)  # type: ignore[no-untyped-call]
    return out


def reduce_from_region(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """[batch, seq, hidden], partial on each rank -> their sum [batch, seq(local), hidden]: out of the region.
    The gradient of ``x`` is that of the sum."""
    out: Tensor = _Region.apply(x, group, False)  # type: ignore[no-untyped-call]
    return out


def saving_shard(
    shard: Tensor, whole: Tensor, group: TensorParallelGroup, num_uses: int
) -> AbstractContextManager[Any]:
    """Inside, operations that would save ``whole`` for their backward save ``shard``, and all-gather it then.

    Without it every rank would save the whole sequence. Where layers are recomputed nothing is saved
    anyway. ``num_uses``: products that save ``whole``; the first to run its backward gathers for all.

    Source: Korthikanti et al. (2022), section 4.2.2.
    """
    if not group.saves_shard:
        return nullcontext()
    return saving_instead_of(whole, _Shard(in_backward(shard), group, num_uses).gather)


@dataclass
class _Shard:
    """A part of a sequence, gathered on demand."""

    part: Callable[[], Tensor]
    group: TensorParallelGroup
    num_uses_left: int
    whole: Tensor | None = None

    def gather(self) -> Tensor:
        whole = self.group.all_gather_sequence(self.part()) if self.whole is None else self.whole
        self.num_uses_left -= 1
        self.whole = whole if self.num_uses_left > 0 else None
        return whole


class _Region(torch.autograd.Function):
    """The way into a region, or out of it; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorParallelGroup, enters: bool) -> Tensor:
        ctx.group, ctx.enters = group, enters
        return _whole(x, group) if enters else _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_sum if ctx.enters else _whole)(grad, ctx.group), None, None


def _whole(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """The whole sequence: gathered, or a view of ``x`` where each rank has it."""
    return group.all_gather_sequence(x) if group.splits_sequence else x.view_as(x)


def _sum(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Sums over the ranks. Not in place: another operation may need ``x``."""
    if group.splits_sequence:
        return group.reduce_scatter_sequence(x)
    return group.all_reduce(x.clone(memory_format=torch.contiguous_format))
