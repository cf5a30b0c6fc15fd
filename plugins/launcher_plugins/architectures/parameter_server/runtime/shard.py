"""A server's key range: master weights, moments, and the update of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.runtime.api import DTYPES, FragmentReader, GlobalFragment, GlobalSlice, RankContext
from launcher.runtime.checkpoint.fragments import KINDS, MOMENTS, STEP, boxes, scalar_fragment, state_name
from launcher.runtime.train.optimizer import adamw
from launcher_plugins.architectures.parameter_server.config import settings_of
from launcher_plugins.architectures.parameter_server.runtime.wire import Held, Layout


@dataclass(frozen=True, kw_only=True)
class Part:
    """What of one parameter lies in a piece."""

    held: Held
    start: int
    """Its first element among the parameter's own."""
    master: Tensor
    """Flat; a view of the piece."""
    gradient: Tensor


class Piece:
    """A server's part of one bucket."""

    def __init__(self, ctx: RankContext, layout: Layout, bucket: int, server: int) -> None:
        precision = ctx.config.precision
        start, stop = layout.span(bucket, server)
        self.numel, self._compute = stop - start, DTYPES[precision.compute]
        dtype = torch.float32 if precision.master_weights else self._compute
        self.master = torch.empty(self.numel, dtype=dtype)
        self.gradient = torch.zeros(self.numel, dtype=dtype)
        self.parts = tuple(self._parts(layout.buckets[bucket], start, stop))
        optimizer = adamw(((part.master, len(part.held.shape)) for part in self.parts), ctx.config)
        assert optimizer is not None, "a piece without parameters"
        self._optimizer = optimizer

    def parameters(self) -> Tensor:
        """As the workers use them; the master weights themselves where the formats are the same."""
        return self.master.to(self._compute)

    def update(self, lr: float, factor: float) -> None:
        """One step with ``gradient``, which ``factor`` clips."""
        if factor != 1:
            self.gradient.mul_(factor)
        for part in self.parts:
            part.master.grad = part.gradient
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def state(self) -> Iterator[GlobalFragment]:
        """Weights and moments under their global names."""
        for part in self.parts:
            known = self._optimizer.state.get(part.master, {})
            tensors = {kind: known.get(kind, torch.zeros_like(part.master)) for kind in MOMENTS}
            for kind, flat in {"weight": part.master, **tensors}.items():
                yield from _fragments(part, kind, flat)

    def load(self, read: FragmentReader, num_updates: int) -> None:
        """Takes back what `state` gave, under any layout."""
        for part in self.parts:
            tensors = {kind: torch.empty_like(part.master) for kind in KINDS}
            for kind, flat in tensors.items():
                for fragment in _fragments(part, kind, flat):
                    fragment.tensor.copy_(
                        read(fragment.slice.name, fragment.slice.offset, fragment.tensor.shape)
                    )
            part.master.copy_(tensors.pop("weight"))
            self._optimizer.state[part.master] = {"step": torch.tensor(float(num_updates)), **tensors}

    def _parts(self, bucket: tuple[Held, ...], start: int, stop: int) -> Iterator[Part]:
        first = 0
        for held in bucket:
            low, high = max(start, first), min(stop, first + held.numel)
            if low < high:
                own = slice(low - start, high - start)
                yield Part(held=held, start=low - first, master=self.master[own], gradient=self.gradient[own])
            first += held.numel


def _fragments(part: Part, kind: str, flat: Tensor) -> Iterator[GlobalFragment]:
    """A flat part of a tensor as boxes of it, each a view."""
    name, shape = state_name(kind, part.held.name), part.held.shape
    for box in boxes(shape, part.start, part.start + flat.numel()):
        first = box.start - part.start
        where = GlobalSlice(name=name, shape=shape, offset=box.offset, is_sharded=False)
        yield GlobalFragment(slice=where, tensor=flat[first : first + box.numel].view(box.shape))


class Shard:
    """All pieces of a server.

    In lock-step all servers have made the same updates. Else each counts its own, and saves that count
    beside the first server's, which is what another architecture goes on with.
    """

    def __init__(self, ctx: RankContext, layout: Layout, server: int) -> None:
        self.pieces = {bucket: Piece(ctx, layout, bucket, server) for bucket in layout.pieces(server)}
        self.num_updates = 0
        self._is_first = server == 0
        self._counts_alone = not settings_of(ctx.config).is_lockstep
        self._own_step = f"{STEP}_of_server_{server}"

    def state(self) -> Iterator[GlobalFragment]:
        """What is saved of this server."""
        for piece in self.pieces.values():
            yield from piece.state()
        if self._is_first:
            yield scalar_fragment(STEP, self.num_updates)
        if self._counts_alone:
            yield scalar_fragment(self._own_step, self.num_updates)

    def load(self, read: FragmentReader) -> None:
        """Takes back what `state` gave, under any layout."""
        self.num_updates = int(read(self._own_step if self._counts_alone else STEP, (), ()))
        for piece in self.pieces.values():
            piece.load(read, self.num_updates)
