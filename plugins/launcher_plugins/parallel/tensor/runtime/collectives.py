"""Collectives between tensor-parallel ranks, and the two edges of a split region with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.runtime.api import RankContext
from launcher.runtime.model.recompute import in_backward, standing_in

_SEQUENCE = 1
"""The dim of the sequence in [batch, seq, hidden]."""


class TensorWire:
    """Talks to the tensor-parallel group; every call is timed as ``tp``."""

    def __init__(self, ctx: RankContext, *, splits_sequence: bool) -> None:
        self.rank, self.size = ctx.groups.tp.rank, ctx.groups.tp.size
        self.splits_sequence = splits_sequence
        self.gathers_again = splits_sequence and self.size > 1
        """Whether a split region keeps its input in parts, for the price of one more gathering."""
        self._group = ctx.groups.tp.handle
        self._clock = ctx.clock

    def all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor:
        """``x`` over all ranks, written into ``x``."""
        reduction = dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM
        if self.size > 1:
            with self._clock.section("tp"):
                dist.all_reduce(x, reduction, self._group)
        return x

    def gather_sequence(self, x: Tensor) -> Tensor:
        """[batch, seq / tp, hidden] of each rank -> [batch, seq, hidden] on all."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._clock.section("tp"):
            dist.all_gather(parts, x, self._group)
        return torch.cat(parts, _SEQUENCE)

    def scatter_sequence(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] of each rank -> this rank's [batch, seq / tp, hidden] of their sum."""
        if self.size == 1:
            return x
        parts = [part.contiguous() for part in x.chunk(self.size, _SEQUENCE)]
        out = torch.empty_like(parts[self.rank])
        with self._clock.section("tp"):
            dist.reduce_scatter(out, parts, group=self._group)
        return out


def enter(x: Tensor, wire: TensorWire) -> Tensor:
    """[batch, seq(local), hidden] -> [batch, seq, hidden], whole on each rank: into a split region."""
    out: Tensor = _Enter.apply(x, wire)  # type: ignore[no-untyped-call]
    return out


def leave(x: Tensor, wire: TensorWire) -> Tensor:
    """[batch, seq, hidden], partial on each rank -> their sum [batch, seq(local), hidden]: out of it."""
    out: Tensor = _Leave.apply(x, wire)  # type: ignore[no-untyped-call]
    return out


def keeping_part(part: Tensor, whole: Tensor, wire: TensorWire, num_uses: int) -> AbstractContextManager[Any]:
    """Inside, what would keep ``whole`` for its backward keeps ``part`` instead, and gathers it again then.

    Without it every rank would hold the whole sequence. Where layers are recomputed nothing is held
    anyway. ``num_uses``: products that keep ``whole``; the first to run its backward gathers for all.

    Source: Korthikanti et al. (2022), section 4.2.2.
    """
    if not wire.gathers_again:
        return nullcontext()
    return standing_in(whole, _Part(in_backward(part), wire, num_uses).gather)


@dataclass
class _Part:
    """A part of a sequence that is gathered when it is asked for."""

    part: Callable[[], Tensor]
    wire: TensorWire
    num_uses_left: int
    whole: Tensor | None = None

    def gather(self) -> Tensor:
        whole = self.wire.gather_sequence(self.part()) if self.whole is None else self.whole
        self.num_uses_left -= 1
        self.whole = whole if self.num_uses_left > 0 else None
        return whole


class _Enter(torch.autograd.Function):
    """Each rank uses the whole input for its own slice, so the input's gradient is a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: TensorWire) -> Tensor:
        ctx.wire = wire
        return wire.gather_sequence(x) if wire.splits_sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.wire), None


class _Leave(torch.autograd.Function):
    """Each rank's part enters the sum with weight 1, so the gradient of the sum is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: TensorWire) -> Tensor:
        ctx.wire = wire
        return _sum(x, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wire: TensorWire = ctx.wire
        return (wire.gather_sequence(grad) if wire.splits_sequence else grad), None


def _sum(x: Tensor, wire: TensorWire) -> Tensor:
    """Sums over the ranks. Out of place: ``x`` may be needed by whoever made it."""
    if wire.splits_sequence:
        return wire.scatter_sequence(x)
    return wire.all_reduce(x.clone(memory_format=torch.contiguous_format))
