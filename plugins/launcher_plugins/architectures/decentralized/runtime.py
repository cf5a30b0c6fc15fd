"""Gradients all-reduced in two levels: inside each node, between the nodes, and inside each node again.

Four replicas on two nodes, one bucket of two halves:

    node 0   a0 a1   reduce-scatter   a0+b0        all-reduce     a0+b0+c0+d0    all-gather   whole sum
             b0 b1                    a1+b1        of each part   a1+b1+c1+d1                 whole sum
    node 1   c0 c1                    c0+d0        over the       a0+b0+c0+d0                 whole sum
             d0 d1                    c1+d1        nodes          a1+b1+c1+d1                 whole sum
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.contract.mesh import Cluster
from launcher.runtime.api import Handle, RankContext, Update, Waiting
from launcher.runtime.process.groups import new_group
from launcher.runtime.process.heartbeat import message_timeout_s
from launcher.runtime.train.native_update import NativeUpdate
from launcher_plugins.architectures.decentralized.plan import DecentralizedConfig


class HierarchicalSum:
    """Starts the sum of one bucket after the other, each in place.

    The scatter and the gather have a group each: they are started by two threads, and the members of
    one group must start its collectives in one order.
    """

    def __init__(self, ctx: RankContext) -> None:
        """Makes the groups. Collective over the data-parallel group."""
        inside, across = _members(ctx)
        self._scatter, self._gather, self._across = (
            new_group(ranks, message_timeout_s(ctx.config.run)) for ranks in (inside, inside, across)
        )
        self._num_local = len(inside)
        self._stream: torch.cuda.Stream | None = None
        if ctx.device.type == "cuda":
            self._stream = torch.cuda.Stream(ctx.device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hierarchical-sum")

    def __call__(self, bucket: Tensor) -> Handle:
        """Starts summing a flat bucket over the replicas, in place."""
        if self._stream is None:
            later = self._thread.submit(self._finish, bucket, *self._start(bucket))
            return Waiting(lambda: later.result().wait())
        self._stream.wait_stream(torch.cuda.current_stream(bucket.device))
        with torch.cuda.stream(self._stream):  # waiting blocks this stream alone
            self._finish(bucket, *self._start(bucket)).wait()
        event = self._stream.record_event()
        return Waiting(lambda: torch.cuda.current_stream().wait_event(event))

    def _start(self, bucket: Tensor) -> tuple[Tensor, Tensor, Handle]:
        """Starts the sum inside the node. Returns the bucket, or a copy padded so that the node's replicas
        can share it evenly; this rank's part; and the handle of the part."""
        padding = -bucket.numel() % self._num_local
        whole = torch.nn.functional.pad(bucket, (0, padding)) if padding else bucket
        part = whole.new_empty(whole.numel() // self._num_local)
        scattered = dist.reduce_scatter_tensor(part, whole, group=self._scatter, async_op=True)
        return whole, part, cast(Handle, scattered)

    def _finish(self, bucket: Tensor, whole: Tensor, part: Tensor, scattered: Handle) -> Handle:
        """Waits for it, sums the part over the nodes, and starts collecting the parts inside the node."""
        scattered.wait()
        self.sum_across(part)
        gathered = cast(Handle, dist.all_gather_into_tensor(whole, part, group=self._gather, async_op=True))

        def wait() -> None:
            gathered.wait()
            if whole is not bucket:
                bucket.copy_(whole[: bucket.numel()])

        return Waiting(wait)

    def sum_across(self, part: Tensor) -> None:
        """Sums a part over the nodes."""
        dist.all_reduce(part, group=self._across)


def _members(ctx: RankContext) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The replicas on this rank's node, and those on all nodes that have the same part of a bucket."""
    cluster = Cluster(config=ctx.config.cluster)
    on_node: dict[int, list[int]] = defaultdict(list)
    for rank in ctx.groups.dp.ranks:
        on_node[cluster.node(rank)].append(rank)
    inside = on_node[cluster.node(ctx.plan.rank)]
    index = inside.index(ctx.plan.rank)
    return tuple(inside), tuple(ranks[index] for ranks in on_node.values())


def update(ctx: RankContext) -> Update:
    """The update of this rank: summed gradients, AdamW on every replica."""
    if ctx.config.architecture.settings(DecentralizedConfig).reduce == "hierarchical":
        ctx.exchange_gradients = HierarchicalSum(ctx)
    return NativeUpdate(ctx)
