"""Sums over a group: of several tensors in one message, or of a number while something else goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.runtime.api import Handle, RankContext
from launcher.runtime.process.groups import Group


def sum_in_one_message(tensors: Sequence[Tensor], group: Group) -> None:
    """Sums each tensor over a group, in place; all travel together."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group.handle)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class Total:
    """A number whose sum over the replicas is under way."""

    def __init__(self, ctx: RankContext, value: Tensor, *, together: bool) -> None:
        """Starts; ``together`` False: the number stays this replica's own. Collective over the replicas.

        ``value``: a scalar, fp64 where whole numbers must stay whole.
        """
        self._clock, self._value = ctx.clock, value
        self._handle: Handle | None = None
        if together and ctx.replicas is not None:
            self._handle = ctx.replicas.sum(value)
        elif together and ctx.groups.dp.size > 1:
            self._handle = dist.all_reduce(value, group=ctx.groups.dp.handle, async_op=True)

    def value(self) -> Tensor:
        """The sum, as soon as it is there."""
        if self._handle is not None:
            with self._clock.section("dp"):
                self._handle.wait()
            self._handle = None
        return self._value
