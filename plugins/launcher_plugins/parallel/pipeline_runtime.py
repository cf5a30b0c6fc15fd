"""Messages between pipeline ranks over torch.distributed."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from launcher.runtime.api import Handle, RankContext
from launcher.runtime.groups import Group


def apply(ctx: RankContext) -> None:
    """Gives the rank its transport."""
    ctx.transport = NeighbourTransport(ctx.groups.pp, ctx.groups.pp_up)


class NeighbourTransport:
    """Two process groups, one for messages to a higher rank and one for messages to a lower rank.

    NCCL runs the messages of one pair of ranks in one communicator one after the other: with a
    group for each way, a send down the pipeline never stands behind a send up it.
    """

    def __init__(self, down: Group, up: Group) -> None:
        self._down, self._up = down, up

    def receive(self, buffer: Tensor, source: int, tag: int) -> Handle:
        """Posts the receive of one message from a pp_rank into ``buffer``."""
        group = self._group(source, self._down.rank)
        return _started(dist.irecv(buffer, group.ranks[source], group=group.handle, tag=tag))

    def send(self, tensor: Tensor, destination: int, tag: int) -> Handle:
        """Starts sending a contiguous tensor to a pp_rank, without blocking."""
        group = self._group(self._down.rank, destination)
        return _started(dist.isend(tensor, group.ranks[destination], group=group.handle, tag=tag))

    def _group(self, source: int, destination: int) -> Group:
        return self._down if source < destination else self._up


def _started(work: dist.Work | None) -> Handle:
    assert work is not None, "this rank is not a member of the pipeline's group"
    return work
