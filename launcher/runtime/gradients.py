"""Gradients in flat buckets, each exchanged as soon as the backward has filled it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from launcher.runtime.api import Handle


@dataclass
class Bucket:
    """Some parameters' gradients as views into one flat tensor."""

    flat: Tensor
    params: list[nn.Parameter]
    num_missing: int = 0
    """Gradients that the running last backward has still to add."""
    handle: Handle | None = None


@dataclass
class GradientBuckets:
    """The gradients of every chunk of a rank.

    Each parameter belongs to one chunk, the first that holds it: that one is the last to run
    backward. During a chunk's last backward a bucket is exchanged when its last gradient is added,
    while the backward goes on. Buckets are filled from the last parameter to the first, the order
    in which a backward reaches them.
    """

    dtype: torch.dtype
    """Number format of the accumulated and exchanged gradients."""
    bucket_bytes: int
    exchange: Callable[[Tensor], Handle] | None
    """Starts a sum over the replicas, in place; None: there is one replica."""
    _chunks: list[list[Bucket]] = field(default_factory=list)
    _views: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _last_chunk: int | None = None
    """The chunk whose last backward is running."""

    def add_chunk(self, chunk: nn.Module) -> None:
        """Makes the buckets of the next chunk's parameters."""
        place = len(self._chunks)
        params = [p for p in chunk.parameters() if p.requires_grad and p not in self._views]
        self._chunks.append([self._bucket(part, place) for part in self._split(params[::-1])])

    def view(self, param: nn.Parameter) -> Tensor:
        """The gradient of a parameter, in its shape."""
        return self._views[param]

    def backward(self, out: Tensor, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        """Runs the backward and accumulates; with ``last`` also exchanges the chunk's buckets."""
        self._last_chunk = chunk if last else None
        if last:
            for bucket in self._chunks[chunk]:
                bucket.num_missing = len(bucket.params)
        torch.autograd.backward(out, grad)
        self._last_chunk = None
        if last:
            for bucket in self._chunks[chunk]:
                if bucket.handle is None:  # holds a parameter that took no part in this backward
                    self._start(bucket)

    def wait(self) -> None:
        """Returns when every exchange is done."""
        for bucket in self._all():
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None

    def clear(self) -> None:
        """Sets every gradient to zero."""
        for bucket in self._all():
            bucket.flat.zero_()

    def _all(self) -> list[Bucket]:
        return [bucket for chunk in self._chunks for bucket in chunk]

    def _split(self, params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        parts: list[list[nn.Parameter]] = []
        room = 0
        for param in params:
            num_bytes = param.numel() * self.dtype.itemsize
            if not parts or num_bytes > room:
                parts.append([])
                room = self.bucket_bytes
            parts[-1].append(param)
            room -= num_bytes
        return parts

    def _bucket(self, params: list[nn.Parameter], chunk: int) -> Bucket:
        numel = sum(param.numel() for param in params)
        flat = torch.zeros(numel, dtype=self.dtype, device=params[0].device)
        bucket = Bucket(flat=flat, params=params)
        start = 0
        for param in params:
            view = flat[start : start + param.numel()].view_as(param)
            start += param.numel()
            self._views[param] = view
            if param.dtype == self.dtype:
                param.grad = view  # autograd adds in place
            param.register_post_accumulate_grad_hook(self._hook(bucket, chunk))  # type: ignore[no-untyped-call]
        return bucket

    def _hook(self, bucket: Bucket, chunk: int) -> Callable[[Tensor], None]:
        def accumulated(param: Tensor) -> None:
            assert isinstance(param, nn.Parameter), "a hook on what is not a parameter"
            assert param.grad is not None, "the hook runs after a gradient was accumulated"
            view = self._views[param]
            if param.grad.data_ptr() != view.data_ptr():
                view.add_(param.grad)
                param.grad = None
            if self._last_chunk == chunk:
                bucket.num_missing -= 1
                if bucket.num_missing == 0:
                    self._start(bucket)

        return accumulated

    def _start(self, bucket: Bucket) -> None:
        if self.exchange is not None:
            bucket.handle = self.exchange(bucket.flat)
