"""Selective recomputation: cheap outputs are not saved for the backward but computed again there.

    x --norm--> y --matmul-->      the matmul needs y for the gradient of its weights, the norm needs x:
                                   only x is saved, and y is computed from it again when the matmul asks

So the norms and the activation functions run twice, and an attention that is not one kernel; no matmul
with weights does, and no message. A recomputed output lives from the first request until the backward of
its own operation is done. Megatron-LM calls this a checkpoint without output.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 5.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Function = Callable[..., Tensor]
"""A function of tensors that is cheap to compute."""


def checkpoint_without_output(function: Function, *inputs: Tensor, is_enabled: bool = True) -> Tensor:
    """``function(*inputs)``, of which only the inputs are saved for the backward.

    An operation that would save the result for a backward of its own has to run inside `discarding_output`.
    ``is_enabled`` False: a plain call.
    """
    if not (is_enabled and torch.is_grad_enabled()):
        return function(*inputs)
    checkpoint = Checkpoint(function)
    out: Tensor = _WithoutOutput.apply(checkpoint, *inputs)  # type: ignore[no-untyped-call]
    out.checkpoint = checkpoint  # type: ignore[attr-defined]
    return out


def in_backward(x: Tensor) -> Callable[[], Tensor]:
    """A function that returns ``x`` in the backward: recomputed where it was checkpointed, else saved."""
    checkpoint = getattr(x, "checkpoint", None)
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.value
    saved = x.detach()
    return lambda: saved


def discarding_output(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, operations that would save the output ``x`` of a checkpoint for their backward recompute it
    then. ``x`` must outlive the context. Any other tensor is saved as always."""
    if not isinstance(getattr(x, "checkpoint", None), Checkpoint):
        return nullcontext()
    return saving_instead_of(x, in_backward(x))


def saving_instead_of(x: Tensor, value: Callable[[], Tensor]) -> AbstractContextManager[Any]:
    """Inside, operations that would save ``x`` for their backward save ``value`` instead, and call it
    then."""
    address, size = x.data_ptr(), x.numel()  # autograd keeps the hooks: they must not hold x itself
    form, in_order = (x.shape, x.stride()), x.is_contiguous()

    def pack(tensor: Tensor) -> Tensor | _Placeholder:
        if tensor.data_ptr() != address or tensor.numel() != size:
            return tensor
        is_it = (tensor.shape, tensor.stride()) == form
        is_matrix = in_order and tensor.is_contiguous()  # as a product may save it; a transpose is saved
        return _Placeholder(value, tensor.shape) if is_it or is_matrix else tensor

    def unpack(saved: Tensor | _Placeholder) -> Tensor:
        return saved.value().view(saved.shape) if isinstance(saved, _Placeholder) else saved

    return saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class _Placeholder:
    """Saved in place of a tensor of ``shape``."""

    value: Callable[[], Tensor]
    shape: torch.Size


class Checkpoint:
    """An output that is recomputed on demand, once for all operations that need it."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.node: Callable[[], Any] = lambda: None
        """The function's node in the graph, which has saved the inputs. Weak: the node holds this, too."""
        self._leaves: tuple[Tensor, ...] = ()
        self._output: Tensor | None = None

    def value(self) -> Tensor:
        """The output, without its graph."""
        return self._recomputed().detach()

    def backward(self, grad: Tensor) -> list[Tensor | None]:
        """Gradients of the inputs, None for those that need none; frees the output."""
        output = self._recomputed()
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, grad))
        gradients = [next(found) if leaf.requires_grad else None for leaf in self._leaves]
        self._leaves, self._output = (), None
        return gradients

    def _recomputed(self) -> Tensor:
        if self._output is None:
            inputs = self.node().saved_tensors
            self._leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
            with torch.enable_grad():
                self._output = self.function(*self._leaves)
        return self._output


class _WithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, checkpoint: Checkpoint, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.checkpoint, checkpoint.node = checkpoint, weakref.ref(ctx)
        return checkpoint.function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.checkpoint.backward(grads[0])
