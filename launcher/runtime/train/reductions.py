"""Sums over a group: of gradients of copies in one message, or of a number while other work goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.runtime.api import Handle, RankContext, slice_of
from launcher.runtime.train.gradient_buckets import unflatten


def sum_gradients_of_copies(
    ctx: RankContext, params: Sequence[nn.Parameter], gradient: Callable[[nn.Parameter], Tensor]
) -> None:
    """Sums in place the gradients of parameters of which several ranks have copies: over the tensor-parallel
    ranks where each saw a part of the sequence or of the heads, and over the first and the last stage where
    they are tied."""
    slices = [(param, slice_of(param)) for param in params]
    _all_reduce(ctx, "tp", [gradient(param) for param, where in slices if where.is_summed_over_tp])
    _all_reduce(ctx, "tied", [gradient(param) for param, where in slices if where.is_tied])


def _all_reduce(ctx: RankContext, kind: str, tensors: Sequence[Tensor]) -> None:
    """Sums each tensor over a group of this rank (``kind``), in place and in one message."""
    group = ctx.groups.tp if kind == "tp" else ctx.groups.tied
    if group.size == 1 or not tensors:
        return
    with ctx.clock.section(kind):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group.handle)
        for tensor, summed in zip(tensors, unflatten(flat, tensors), strict=True):
            tensor.copy_(summed)


class PendingSum:
    """A number whose sum over the replicas is under way."""

    def __init__(self, ctx: RankContext, value: Tensor, *, over_replicas: bool) -> None:
        """Starts; ``over_replicas`` False: the number stays this replica's own. Collective over the replicas.

        ``value``: a scalar, fp64 where integers must stay exact.
        """
        self._clock, self._value = ctx.clock, value
        self._handle: Handle | None = None
        if over_replicas and ctx.replicas is not None:
            self._handle = ctx.replicas.sum(value)
        elif over_replicas and ctx.groups.dp.size > 1:
            self._handle = dist.all_reduce(value, group=ctx.groups.dp.handle, async_op=True)

    def value(self) -> Tensor:
        """The sum; waits for it."""
        if self._handle is not None:
            with self._clock.section("dp"):
                self._handle.wait()
            self._handle = None
        return self._value
