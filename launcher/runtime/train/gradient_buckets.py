"""Gradients in flat buckets, each exchanged as soon as the backward has filled it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from launcher.runtime.api import DTYPES, Handle, RankContext, Root, Update
from launcher.runtime.model.deferred_weight_gradients import DeferredWeightGradient

T = TypeVar("T")


@dataclass
class Bucket:
    """Some parameters' gradients as views into one flat tensor."""

    chunk: int
    flat: Tensor
    params: list[nn.Parameter]
    num_missing: int = 0
    """Gradients that the chunk's last backward has yet to add."""
    is_started: bool = False
    handle: Handle | None = None


@dataclass
class GradientBuckets:
    """The gradients of every chunk of a rank.

    Each parameter belongs to one chunk, the first that holds it: that one is the last to run backward.
    During a chunk's last backward, or during its last weight gradients where these are deferred, a bucket is
    exchanged as soon as its last gradient is added. Buckets hold the parameters from the last to the first,
    the order in which a backward reaches them, and are always exchanged in this order: replicas that took
    another path through a user's layer fill them in another one, and would mix up buckets.
    """

    dtype: torch.dtype
    """Number format of the accumulated and exchanged gradients."""
    bucket_bytes: int
    exchange: Callable[[Tensor], Handle | None] | None
    """Starts a sum over the replicas, in place; None: there is one replica. It returns None where nothing has
    to be waited for."""
    _chunks: list[list[Bucket]] = field(default_factory=list)
    _views: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _bucket_of: dict[nn.Parameter, Bucket] = field(default_factory=dict)
    _last_chunk: int | None = None
    """The chunk whose last backward is running."""

    def add_chunk(self, chunk: nn.Module) -> None:
        """Makes the buckets of the next chunk's parameters."""
        params = [p for p in chunk.parameters() if p.requires_grad and p not in self._views]
        parts = in_buckets(params[::-1], lambda p: p.numel() * self.dtype.itemsize, self.bucket_bytes)
        self._chunks.append([self._bucket(part, len(self._chunks)) for part in parts])

    def view(self, param: nn.Parameter) -> Tensor:
        """The gradient of a parameter, in its shape."""
        return self._views[param]

    def backward(self, out: Root | None, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        """Runs the backward and accumulates; with ``last`` also exchanges the chunk's buckets."""
        if last:
            self._last_chunk = chunk
            for bucket in self._chunks[chunk]:
                bucket.num_missing = len(bucket.params)
        if out is not None:
            torch.autograd.backward(out, grad)
        if last:
            self._last_chunk = None
            self._start_all(chunk)  # also buckets with a parameter that had no gradient in this backward

    @torch.no_grad()
    def backward_weight(self, deferred: Sequence[DeferredWeightGradient], *, chunk: int, last: bool) -> None:
        """Computes and adds deferred weight gradients; with ``last`` also exchanges the chunk's buckets,
        whose other gradients are complete by then."""
        if last:
            weights = Counter(gradient.weight for gradient in deferred)
            for bucket in self._chunks[chunk]:
                bucket.num_missing = sum(weights[param] for param in bucket.params)
        for gradient in deferred:
            self._views[gradient.weight].add_(gradient.compute())
            bucket = self._bucket_of[gradient.weight]
            if last and bucket.chunk == chunk:
                self._count_down(bucket)
        if last:
            self._start_all(chunk)

    def wait(self) -> None:
        """Returns when every exchange is done."""
        for bucket in self.all():
            if bucket.handle is not None:
                bucket.handle.wait()
            bucket.handle, bucket.is_started = None, False

    def clear(self) -> None:
        """Sets every gradient to zero."""
        for bucket in self.all():
            bucket.flat.zero_()

    def all(self) -> list[Bucket]:
        """Every bucket, in the order in which they are exchanged."""
        return [bucket for chunk in self._chunks for bucket in chunk]

    def _bucket(self, params: list[nn.Parameter], chunk: int) -> Bucket:
        numel = sum(param.numel() for param in params)
        flat = torch.zeros(numel, dtype=self.dtype, device=params[0].device)
        bucket = Bucket(chunk=chunk, flat=flat, params=params)
        for param, view in zip(params, unflatten(flat, params), strict=True):
            self._views[param], self._bucket_of[param] = view, bucket
            if param.dtype == self.dtype:
                param.grad = view  # autograd adds in place
            param.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
        return bucket

    def _accumulated(self, param: nn.Parameter) -> None:
        """Runs after autograd has added to a parameter's gradient."""
        assert param.grad is not None, "the hook runs after a gradient was accumulated"
        view, bucket = self._views[param], self._bucket_of[param]
        if param.grad.data_ptr() != view.data_ptr():
            view.add_(param.grad)
            param.grad = None
        if self._last_chunk == bucket.chunk:
            self._count_down(bucket)

    def _count_down(self, bucket: Bucket) -> None:
        bucket.num_missing -= 1
        for other in self._chunks[bucket.chunk]:
            if other.num_missing > 0:
                break
            self._start(other)

    def _start_all(self, chunk: int) -> None:
        for bucket in self._chunks[chunk]:
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        if self.exchange is not None and not bucket.is_started:
            bucket.is_started = True
            bucket.handle = self.exchange(bucket.flat)


class BucketedUpdate(Update):
    """An update of gradients in buckets, which the backward fills and exchanges."""

    def __init__(self, ctx: RankContext, exchange: Callable[[Tensor], Handle | None] | None) -> None:
        """``exchange``: as of `GradientBuckets`."""
        self._ctx = ctx
        self._buckets = GradientBuckets(
            dtype=DTYPES[ctx.config.precision.gradients],
            bucket_bytes=ctx.config.parallel.bucket_bytes,
            exchange=exchange,
        )

    def backward(self, out: Root | None, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        """Backward of one microbatch, with the exchange of the buckets that it completes."""
        is_final = last and not self._ctx.split_backward.is_enabled
        self._buckets.backward(out, grad, chunk=chunk, last=is_final)

    def backward_weight(self, deferred: Sequence[DeferredWeightGradient], *, chunk: int, last: bool) -> None:
        """The weight gradients that a split backward has deferred."""
        self._buckets.backward_weight(deferred, chunk=chunk, last=last)


def in_buckets(items: Sequence[T], num_bytes: Callable[[T], int], bucket_bytes: int) -> list[list[T]]:
    """The items in their order, in parts of at most ``bucket_bytes``; a larger item is a part of its own."""
    parts: list[list[T]] = []
    room = 0
    for item in items:
        if not parts or num_bytes(item) > room:
            parts.append([])
            room = bucket_bytes
        parts[-1].append(item)
        room -= num_bytes(item)
    return parts


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat``, one after the other, in the shapes of ``tensors``."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
