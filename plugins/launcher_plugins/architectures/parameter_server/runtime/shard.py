"""The split of the parameters over the servers, and a server's share: weights, moments and update."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from launcher.runtime.api import DTYPES, FragmentReader, GlobalFragment, GlobalSlice, RankContext
from launcher.runtime.checkpoint.fragments import (
    STEP,
    WEIGHT,
    fill,
    fill_frozen,
    scalar_fragment,
    state_fragments,
    state_name,
)
from launcher.runtime.train.optimizer import (
    make_optimizer,
    set_learning_rate,
    set_state,
    state_shapes,
    state_tensors,
)
from launcher_plugins.architectures.parameter_server.config import settings_of


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """The flattened parameters in buckets, each split into a key range for every server.

    >>> weight = GlobalSlice.unsharded("w", (5, 2))
    >>> [ParameterLayout(buckets=((weight,),), num_servers=3).span(0, server) for server in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """

    buckets: tuple[tuple[GlobalSlice, ...], ...]
    """The parameters of each, in the order in which a backward fills them."""
    num_servers: int
    frozen: tuple[tuple[GlobalSlice, str], ...] = ()
    """The parameters that are not trained, with their number formats. The first server holds them."""

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each bucket."""
        return tuple(sum(prod(param.shape) for param in bucket) for bucket in self.buckets)

    def span(self, bucket: int, server: int) -> tuple[int, int]:
        """The range of a bucket's elements that a server holds: first, and one past the last."""
        numel = self.numels[bucket]
        return server * numel // self.num_servers, (server + 1) * numel // self.num_servers

    def buckets_of(self, server: int) -> tuple[int, ...]:
        """The buckets of which a server holds a part."""
        spans = [self.span(bucket, server) for bucket in range(len(self.buckets))]
        return tuple(bucket for bucket, (start, stop) in enumerate(spans) if start < stop)

    def parts_of(self, bucket: int) -> tuple[tuple[int, slice], ...]:
        """The servers that hold a part of a bucket, each with its range."""
        spans = [self.span(bucket, server) for server in range(self.num_servers)]
        return tuple((server, slice(*span)) for server, span in enumerate(spans) if span[0] < span[1])

    def to_json(self) -> str:
        """As a worker sends it to the servers, which build no model."""
        buckets = [[[param.name, param.shape] for param in bucket] for bucket in self.buckets]
        frozen = [[param.name, param.shape, dtype] for param, dtype in self.frozen]
        return json.dumps([buckets, frozen])

    @staticmethod
    def from_json(text: str, num_servers: int) -> ParameterLayout:
        """The layout of `to_json`."""
        buckets, frozen = json.loads(text)
        return ParameterLayout(
            buckets=tuple(tuple(GlobalSlice.unsharded(*param) for param in bucket) for bucket in buckets),
            num_servers=num_servers,
            frozen=tuple((GlobalSlice.unsharded(name, shape), dtype) for name, shape, dtype in frozen),
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of one parameter in a piece."""

    param: GlobalSlice
    start: int
    """Index of its first element in the flattened parameter."""
    master: Tensor
    """Flat; a view of the piece."""
    gradient: Tensor


class Piece:
    """A server's part of one bucket."""

    def __init__(self, ctx: RankContext, layout: ParameterLayout, bucket: int, server: int) -> None:
        precision = ctx.config.precision
        start, stop = layout.span(bucket, server)
        self.numel, self._compute = stop - start, DTYPES[precision.compute]
        dtype = torch.float32 if precision.master_weights else self._compute
        self.master = torch.empty(self.numel, dtype=dtype)
        self.gradient = torch.zeros(self.numel, dtype=dtype)
        self.parts = tuple(self._parts(layout.buckets[bucket], start, stop))
        self._config = ctx.config
        optimizer = make_optimizer(((part.master, part.param) for part in self.parts), ctx)
        assert optimizer is not None, "a piece without parameters"
        self._optimizer = optimizer

    def parameters(self) -> Tensor:
        """In the workers' format; the master weights themselves where that is the same."""
        return self.master.to(self._compute)

    def update(self, lr: float, factor: float) -> None:
        """One optimizer step with ``gradient`` times ``factor``, which clips it."""
        if factor != 1:
            self.gradient.mul_(factor)
        for part in self.parts:
            part.master.grad = part.gradient
        set_learning_rate(self._optimizer.param_groups, lr)
        self._optimizer.step()

    def state(self) -> Iterator[GlobalFragment]:
        """Weights and moments under their global names."""
        for part in self.parts:
            state = state_tensors(self._optimizer, part.master, self._shapes(part))
            yield from state_fragments(part.param, part.param.shape, state, part.start)

    def load(self, read: FragmentReader, num_updates: int) -> None:
        """Restores what `state` returned, under any layout."""
        for part in self.parts:
            kinds = (WEIGHT, *self._shapes(part))
            tensors = {kind: torch.empty_like(part.master) for kind in kinds}
            fill(state_fragments(part.param, part.param.shape, tensors, part.start), read)
            part.master.copy_(tensors.pop(WEIGHT))
            set_state(self._optimizer, part.master, tensors, num_updates)

    def _shapes(self, part: Part) -> dict[str, tuple[int, ...]]:
        return state_shapes(self._config, part.param, part.master.shape)

    def _parts(self, bucket: tuple[GlobalSlice, ...], start: int, stop: int) -> Iterator[Part]:
        first = 0
        for param in bucket:
            end = first + prod(param.shape)
            low, high = max(start, first), min(stop, end)
            if low < high:
                own = slice(low - start, high - start)
                yield Part(
                    param=param, start=low - first, master=self.master[own], gradient=self.gradient[own]
                )
            first = end


class Shard:
    """All pieces of a server, and on the first the weights that are not trained.

    With synchronous updates all servers have made the same ones. Otherwise each counts its own, and saves
    that count beside the first server's, from which another architecture resumes.
    """

    def __init__(self, ctx: RankContext, layout: ParameterLayout, server: int) -> None:
        self.pieces = {bucket: Piece(ctx, layout, bucket, server) for bucket in layout.buckets_of(server)}
        self.num_updates = 0
        self._is_first = server == 0
        self.frozen = [
            GlobalFragment(
                slice=replace(param, name=state_name("weight", param.name)),
                tensor=torch.empty(param.shape, dtype=getattr(torch, dtype)),
            )
            for param, dtype in (layout.frozen if self._is_first else ())
        ]
        self._is_asynchronous = not settings_of(ctx.config).is_lockstep
        self._own_step = f"{STEP}_of_server_{server}"

    def state(self) -> Iterator[GlobalFragment]:
        """The state of this server."""
        for piece in self.pieces.values():
            yield from piece.state()
        yield from self.frozen
        if self._is_first:
            yield scalar_fragment(STEP, self.num_updates)
        if self._is_asynchronous:
            yield scalar_fragment(self._own_step, self.num_updates)

    def load(self, read: FragmentReader) -> None:
        """Restores what `state` returned, under any layout."""
        self.num_updates = int(read(self._own_step if self._is_asynchronous else STEP, (), ()))
        for piece in self.pieces.values():
            piece.load(read, self.num_updates)
        fill_frozen(self.frozen, read)
