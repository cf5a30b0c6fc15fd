"""Selective recomputation: what costs little to compute is not kept for the backward but computed again.

    x --norm--> y --matmul-->      the matmul needs y for the gradient of its weights, the norm needs x:
                                   only x is kept, and y is made of it again when the matmul asks

So the norms and the activation functions run twice, and an attention that is not one kernel; no matmul
with weights does, and no message. What is computed again lives from the first request until the backward of
its own operation is done.

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

Light = Callable[..., Tensor]
"""A function of tensors that is cheap to compute."""


def light(function: Light, *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, of which only the inputs are kept for the backward.

    Who keeps the result for a backward of its own has to run inside `not_keeping`.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    again = Again(function)
    out: Tensor = _Light.apply(again, *inputs)  # type: ignore[no-untyped-call]
    out.again = again  # type: ignore[attr-defined]
    return out


def in_backward(x: Tensor) -> Callable[[], Tensor]:
    """How to have ``x`` in the backward: computed again where it is `light`, else kept."""
    again = getattr(x, "again", None)
    if isinstance(again, Again):
        return again.value
    kept = x.detach()
    return lambda: kept


def not_keeping(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, what would keep a `light` result for its backward computes it again then. ``x`` must outlive
    the context. Any other tensor is kept as always."""
    if not isinstance(getattr(x, "again", None), Again):
        return nullcontext()
    return standing_in(x, in_backward(x))


def standing_in(x: Tensor, value: Callable[[], Tensor]) -> AbstractContextManager[Any]:
    """Inside, what would keep ``x`` for its backward keeps ``value`` instead, and asks it then."""
    place, size = x.data_ptr(), x.numel()  # autograd keeps the hooks: they must not hold x itself
    form, in_order = (x.shape, x.stride()), x.is_contiguous()

    def pack(tensor: Tensor) -> Tensor | _StandIn:
        if tensor.data_ptr() != place or tensor.numel() != size:
            return tensor
        is_it = (tensor.shape, tensor.stride()) == form
        is_matrix = in_order and tensor.is_contiguous()  # how a product may keep it; a transpose is kept
        return _StandIn(value, tensor.shape) if is_it or is_matrix else tensor

    def unpack(saved: Tensor | _StandIn) -> Tensor:
        return saved.value().view(saved.shape) if isinstance(saved, _StandIn) else saved

    return saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class _StandIn:
    """Keeps the place of a tensor of ``shape``."""

    value: Callable[[], Tensor]
    shape: torch.Size


class Again:
    """A result that can be computed again, once for all who ask."""

    def __init__(self, function: Light) -> None:
        self.function = function
        self.node: Callable[[], Any] = lambda: None
        """The function's place in the graph, which holds the inputs. Weak: it holds this, too."""
        self._leaves: tuple[Tensor, ...] = ()
        self._output: Tensor | None = None

    def value(self) -> Tensor:
        """The result, without its graph."""
        return self._computed().detach()

    def backward(self, grad: Tensor) -> list[Tensor | None]:
        """Gradients of the inputs, None for those that need none; lets go of the result."""
        output = self._computed()
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, grad))
        gradients = [next(found) if leaf.requires_grad else None for leaf in self._leaves]
        self._leaves, self._output = (), None
        return gradients

    def _computed(self) -> Tensor:
        if self._output is None:
            inputs = self.node().saved_tensors
            self._leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
            with torch.enable_grad():
                self._output = self.function(*self._leaves)
        return self._output


class _Light(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: Again, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.again, again.node = again, weakref.ref(ctx)
        return again.function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.again.backward(grads[0])
