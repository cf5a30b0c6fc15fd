"""Each replica updates its own weights and averages them with its neighbours' on a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.contract.records import REPLICATED
from launcher.runtime.api import FragmentReader, GlobalFragment, RankContext, StepOutcome, Update
from launcher.runtime.checkpoint.fragments import fill_frozen, frozen_weights, owned, scalar_fragment
from launcher.runtime.process.groups import new_group
from launcher.runtime.process.heartbeat import message_timeout_s
from launcher.runtime.process.log import log
from launcher.runtime.train.gradient_buckets import in_buckets, unflatten
from launcher.runtime.train.native_update import NativeUpdate
from launcher.runtime.train.optimizer import squared_norm

NUM_REPLICAS = "gossip/num_replicas"
"""Name of the number of replicas whose own states a checkpoint holds."""


def update(ctx: RankContext) -> Update:
    """The update of this rank: its own gradients, averaged weights."""
    ctx.exchange_gradients = None
    return GossipUpdate(ctx)


class GossipUpdate(NativeUpdate):
    """AdamW on this replica's gradient, applied to the average of its weights and its neighbours'."""

    def __init__(self, ctx: RankContext) -> None:
        super().__init__(ctx)
        self._replicas = ctx.groups.dp
        # A group of its own: an exchange is under way while the loss is summed over the replicas.
        group = new_group(self._replicas.ranks, message_timeout_s(ctx.config.run))
        self._exchange = NeighbourExchange(group, neighbours(self._replicas.ranks, self._replicas.rank))

    @property
    def loss_scale(self) -> float:
        """The number of replicas: the loop divides the loss by the targets of the global batch, and the mean
        of the gradients over the replicas, so scaled, is the gradient of that batch."""
        return float(self._replicas.size)

    def prepare(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Takes over the chunks' parameters; returns the modules to run."""
        modules = super().prepare(chunks)
        self._exchange.flatten(list(self._masters.values()), self._ctx.config.parallel.bucket_bytes)
        return modules

    def begin(self, step: int) -> None:
        """Starts the exchange of the weights; forward and backward do not write them."""
        self._exchange.start()

    def apply(self, step: int) -> StepOutcome:
        """Averages the weights, then clips and applies this replica's gradient to them."""
        with self._ctx.clock.section("dp"):
            self._exchange.wait()
        with self._ctx.clock.section(REPLICATED):
            disagreement = self._exchange.average()
        return replace(super().apply(step), disagreement=disagreement)

    def state(self) -> Iterator[GlobalFragment]:
        """Every replica's own state, and the average of all under the usual names. Collective."""
        rank, num_replicas = self._replicas.rank, self._replicas.size
        for fragment in self._replica_state():
            where, own = fragment.slice, fragment.tensor.detach()
            yield GlobalFragment(slice=replace(where, name=_own_name(where.name, rank)), tensor=own)
            if own.dim():  # scalars of the optimizer are the same everywhere
                own = own.clone()
                dist.all_reduce(own, group=self._replicas.handle)
                own.div_(num_replicas)
            if rank == 0:
                yield GlobalFragment(slice=where, tensor=own)
        if rank == 0:
            yield from owned(frozen_weights(self._params), self._ctx.groups.tp.rank)
            if self._ctx.groups.model.rank == 0:
                yield scalar_fragment(NUM_REPLICAS, num_replicas)

    def load(self, read: FragmentReader) -> None:
        """Restores each replica's own state if there are as many as before; else all start from the
        average."""
        found, rank = int(read(NUM_REPLICAS, (), ())), self._replicas.rank
        if found == self._replicas.size:
            self._load_replica(lambda name, offset, shape: read(_own_name(name, rank), offset, shape))
            fill_frozen(frozen_weights(self._params), read)
            return
        super().load(read)
        if found:
            log(f"{found} replicas were saved: these {self._replicas.size} start from their average")


def _own_name(name: str, rank: int) -> str:
    """The name of one replica's part of the state.

    >>> _own_name("weight/layers.3.norm.weight", 2)
    'replica.2/weight/layers.3.norm.weight'
    """
    return f"replica.{rank}/{name}"


class NeighbourExchange:
    """Exchanges some tensors with a replica's neighbours and averages theirs and its own."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """``ranks``: the neighbours' global ranks, one or two."""
        self._group, self._ranks = group, ranks
        self._buckets: list[tuple[Tensor, list[Tensor]]] = []
        """Flat weights, and those of each neighbour."""
        self._handles: list[dist.Work] = []

    def flatten(self, tensors: Sequence[Tensor], bucket_bytes: int) -> None:
        """Moves the tensors' data into flat buckets, each sent as one message."""
        for part in in_buckets(tensors, lambda tensor: tensor.nbytes, bucket_bytes):
            flat = torch.cat([tensor.detach().flatten() for tensor in part])
            for tensor, view in zip(part, unflatten(flat, part), strict=True):
                tensor.data = view
            self._buckets.append((flat, [torch.empty_like(flat) for _ in self._ranks]))

    def start(self) -> None:
        """Starts all messages; the tensors must not be written to until `wait` returns."""
        for number, (flat, received) in enumerate(self._buckets):
            sends = [dist.P2POp(dist.isend, flat, rank, self._group, number) for rank in self._ranks]
            receives = [
                dist.P2POp(dist.irecv, buffer, rank, self._group, number)
                for rank, buffer in zip(self._ranks, received, strict=True)
            ]
            self._handles += dist.batch_isend_irecv([*sends, *receives])

    def wait(self) -> None:
        """Returns when all messages are done."""
        for handle in self._handles:
            handle.wait()
        self._handles = []

    @torch.no_grad()
    def average(self) -> float:
        """Replaces the own tensors by the average of own and received ones, each with the same weight.

        Returns how far that moved the own ones: the norm of the difference over that of the average.
        """
        if not self._buckets:  # nothing of this stage is trained
            return 0.0
        squares = torch.zeros(2, dtype=torch.float64, device=self._buckets[0][0].device)
        for own, received in self._buckets:
            mean = own.clone()
            for theirs in received:
                mean.add_(theirs)
            mean.div_(1 + len(received))
            for index, tensor in enumerate((own.sub_(mean), mean)):
                squares[index] += squared_norm([tensor])
            own.copy_(mean)
        moved, norm = squares.sqrt().tolist()
        return moved / norm if norm else 0.0


def neighbours(ranks: Sequence[int], index: int) -> tuple[int, ...]:
    """The one or two neighbours of the rank at ``index`` on a ring.

    >>> neighbours((0, 2, 4, 6), 0), neighbours((1, 3), 1)
    ((6, 2), (1,))
    """
    before, after = ranks[index - 1], ranks[(index + 1) % len(ranks)]
    return (before,) if before == after else (before, after)
