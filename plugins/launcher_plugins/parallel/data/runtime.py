"""The all-reduce of gradients over the data-parallel replicas, bucket by bucket, during the backward."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch import Tensor

from launcher.runtime.api import Handle, RankContext


def apply(ctx: RankContext) -> None:
    """Sets the rank's exchange of gradients."""
    group = ctx.groups.dp.handle

    def all_reduce(bucket: Tensor) -> Handle:
        return cast(Handle, dist.all_reduce(bucket, group=group, async_op=True))

    ctx.exchange_gradients = all_reduce
