"""Point-to-point messages between pipeline ranks, over torch.distributed."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from launcher.runtime.api import Handle, RankContext
from launcher.runtime.process.groups import Group


def apply(ctx: RankContext) -> None:
    """Sets the rank's transport."""
    ctx.transport = NeighbourTransport(ctx.groups.pp, ctx.groups.pp_up)


class NeighbourTransport:
    """Two process groups, one for messages to a higher rank and one for messages to a lower rank.

    NCCL runs the messages of one pair of ranks in one communicator one after the other: with a group for each
    direction, a send down the pipeline never waits behind a send up it. The methods of the groups are called
    directly, as `torch.distributed.isend` does after its checks: there are two messages for every action.
    """

    def __init__(self, down: Group, up: Group) -> None:
        assert down.handle is not None, "a pipeline of one rank has no messages"
        assert up.handle is not None, "a pipeline of one rank has no messages"
        self._rank, self._down, self._up = down.rank, down.handle, up.handle

    def receive(self, buffer: Tensor, source: int, tag: int) -> Handle:
        """Posts the receive of one message from a pp_rank into ``buffer``."""
        handle: Handle = self._group(source, self._rank).recv([buffer], source, tag)
        return handle

    def send(self, tensor: Tensor, destination: int, tag: int) -> Handle:
        """Starts sending a contiguous tensor to a pp_rank, without blocking."""
        handle: Handle = self._group(self._rank, destination).send([tensor], destination, tag)
        return handle

    def _group(self, source: int, destination: int) -> dist.ProcessGroup:
        return self._down if source < destination else self._up
