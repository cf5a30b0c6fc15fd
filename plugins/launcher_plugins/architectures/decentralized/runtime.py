"""Gradients summed in two levels: inside each node, between the nodes, and spread inside each node again.

Four replicas on two nodes, one bucket of two halves:

    node 0   a0 a1   reduce-scatter   a0+b0        all-reduce     a0+b0+c0+d0    all-gather   whole sum
             b0 b1                    a1+b1        of each part   a1+b1+c1+d1                 whole sum
    node 1   c0 c1                    c0+d0        with its       a0+b0+c0+d0                 whole sum
             d0 d1                    c1+d1        other holder   a1+b1+c1+d1                 whole sum
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.contract.cluster import Cluster
from launcher.runtime.api import Handle, RankContext, Update
from launcher.runtime.process.heartbeat import message_timeout_s
from launcher.runtime.train.native_update import NativeUpdate
from launcher_plugins.architectures.decentralized.plan import settings_of


class HierarchicalSum:
    """Starts the sum of one bucket after the other, each in place.

    The scatter and the gather have a group each: they are started by two threads, and the members of
    one group must start its messages in one order.
    """

    def __init__(self, ctx: RankContext) -> None:
        """Makes the groups. Collective over the data-parallel group."""
        inside, across = _members(ctx)
        timeout = timedelta(seconds=message_timeout_s(ctx.config.run))
        self._scatters, self._gathers, self._across = (
            dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
            for ranks in (inside, inside, across)
        )
        self._num_local = len(inside)
        self._stream: torch.cuda.Stream | None = None
        if ctx.device.type == "cuda":
            self._stream = torch.cuda.Stream(ctx.device)  # type: ignore[no-untyped-call]
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hierarchical-sum")

    def __call__(self, bucket: Tensor) -> Handle:
        """Starts summing a flat bucket over the replicas, in place."""
        if self._stream is None:
            scattered = _Scattered(self, bucket)
            return _Later(self._worker.submit(scattered.finish))
        self._stream.wait_stream(torch.cuda.current_stream(bucket.device))
        with torch.cuda.stream(self._stream):  # waiting holds up this stream alone
            _Scattered(self, bucket).finish().wait()
        return _OnStream(self._stream)

    def scatter(self, whole: Tensor) -> tuple[Tensor, dist.Work]:
        """Starts summing inside the node; this rank's part, and when it is there."""
        part = whole.new_empty(whole.numel() // self._num_local)
        work = dist.reduce_scatter_tensor(part, whole, group=self._scatters, async_op=True)
        return part, _started(work)

    def sum_across(self, part: Tensor) -> None:
        """Sums a part over the nodes."""
        dist.all_reduce(part, group=self._across)

    def gather(self, whole: Tensor, part: Tensor) -> dist.Work:
        """Starts collecting the parts inside the node."""
        return _started(dist.all_gather_into_tensor(whole, part, group=self._gathers, async_op=True))

    def padded(self, bucket: Tensor) -> Tensor:
        """The bucket itself where the node's replicas can share it evenly, else a longer copy."""
        missing = -bucket.numel() % self._num_local
        return torch.nn.functional.pad(bucket, (0, missing)) if missing else bucket


class _Scattered:
    """A bucket whose first level is under way."""

    def __init__(self, levels: HierarchicalSum, bucket: Tensor) -> None:
        self._levels, self._bucket = levels, bucket
        self._whole = levels.padded(bucket)
        self._part, self._work = levels.scatter(self._whole)

    def finish(self) -> Handle:
        """Waits for it, does the second level, and starts the third."""
        self._work.wait()
        self._levels.sum_across(self._part)
        return _Gathered(self._levels.gather(self._whole, self._part), self._whole, self._bucket)


class _Gathered:
    """A bucket whose last level is under way."""

    def __init__(self, work: dist.Work, whole: Tensor, bucket: Tensor) -> None:
        self._work, self._whole, self._bucket = work, whole, bucket

    def wait(self) -> None:
        """Returns when the sum is in the bucket."""
        self._work.wait()
        if self._whole is not self._bucket:
            self._bucket.copy_(self._whole[: self._bucket.numel()])


class _Later:
    """A handle that another thread has still to make."""

    def __init__(self, handle: Future[Handle]) -> None:
        self._handle = handle

    def wait(self) -> None:
        """Returns when the tensor may be used; raises what the thread raised."""
        self._handle.result().wait()


class _OnStream:
    """Work that was put on a stream of its own."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        """Holds up the current stream until the work is done."""
        torch.cuda.current_stream().wait_event(self._event)


def _members(ctx: RankContext) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The replicas on this rank's node, and those on all nodes that hold the same part of a bucket."""
    cluster = Cluster(config=ctx.config.cluster, device=ctx.config.device)
    on_node: dict[int, list[int]] = defaultdict(list)
    for rank in ctx.groups.dp.ranks:
        on_node[cluster.node(rank)].append(rank)
    inside = on_node[cluster.node(ctx.plan.rank)]
    place = inside.index(ctx.plan.rank)
    return tuple(inside), tuple(ranks[place] for ranks in on_node.values())


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not a member of its own group"
    return work


def update(ctx: RankContext) -> Update:
    """The update of this rank: summed gradients, AdamW on every replica."""
    if settings_of(ctx.config.architecture.options).reduce == "hierarchical":
        ctx.exchange_gradients = HierarchicalSum(ctx)
    return NativeUpdate(ctx)
