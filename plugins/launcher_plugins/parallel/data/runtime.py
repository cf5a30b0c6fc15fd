"""The all-reduce of gradients over the data-parallel replicas, bucket by bucket, during the backward."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from launcher.runtime.api import Handle, RankContext


def apply(ctx: RankContext) -> None:
    """Sets the rank's exchange of gradients."""
    group = ctx.groups.dp.handle

    def all_reduce(bucket: Tensor) -> Handle:
        work: dist.Work | None = dist.all_reduce(bucket, group=group, async_op=True)
        assert work is not None, "this rank is not a member of the data-parallel group"
        return work

    ctx.exchange_gradients = all_reduce
