"""A backward split in two: the gradient of the input at once, deferred weight gradients on request.

The previous stage of a pipeline waits for the gradient of an input, and no stage waits for a weight's. A
schedule that splits the backward therefore computes the weight gradients in an action of its own (W). Only
matrix products are deferred; norms, biases and embeddings cost little and stay in the first half.

A user's layer takes part by a method ``split_with``, which is given the rank's `SplitBackward`:

    class Linear(nn.Linear):
        def split_with(self, deferral):
            self.deferral = deferral

        def forward(self, x):
            return self.deferral.linear(x, self.weight, self.bias)

Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

METHOD = "split_with"
"""The method of a user's layer, or of a part of it, whose weight gradients can be deferred."""


@dataclass(frozen=True)
class DeferredWeightGradient:
    """One weight gradient that is still to be computed."""

    weight: nn.Parameter
    compute: Callable[[], Tensor]
    """Returns the gradient, in the weight's shape."""
    saved: tuple[object, ...]
    """What `SplitBackward.save_hook` made of the tensors that it still reads."""


@dataclass
class SplitBackward:
    """Collects the weight gradients that the running backward defers."""

    is_enabled: bool
    """Whether the schedule splits; otherwise every backward is whole."""
    save_hook: Callable[[Tensor], object] = field(default=lambda tensor: tensor)
    """Called with every tensor that a deferred gradient still reads; its result lives as long as the
    gradient."""
    _deferred: list[DeferredWeightGradient] | None = field(default=None)

    @contextmanager
    def collecting(self) -> Iterator[list[DeferredWeightGradient]]:
        """A list that the backward inside fills."""
        assert self._deferred is None, "one backward runs at a time"
        self._deferred = []
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] times weight [out, in] -> [..., out], as `torch.nn.functional.linear`.

        The gradient of a weight that is computed from a parameter (a mask times it, say) is not deferred.
        """
        if not (self.is_enabled and torch.is_grad_enabled()):
            return functional.linear(x, weight, bias)
        out: Tensor = _SplitLinear.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias

    def defer(
        self, weight: nn.Parameter, compute: Callable[[], Tensor], reads: Sequence[Tensor]
    ) -> Tensor | None:
        """Defers a weight gradient, with the tensors that it reads; computes it at once outside of
        `collecting`, and where the backward needs it for what the weight is computed from. None also for one
        that is not trained."""
        if not weight.requires_grad:
            return None
        if self._deferred is None or not weight.is_leaf:
            return compute()
        self._deferred.append(DeferredWeightGradient(weight, compute, tuple(map(self.save_hook, reads))))
        return None


def split_with(layer: nn.Module, deferral: SplitBackward) -> None:
    """Passes ``deferral`` to every part of a user's layer that takes it."""
    for module in layer.modules():
        if hasattr(module, METHOD):
            getattr(module, METHOD)(deferral)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferral: SplitBackward) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.deferral, ctx.weight = deferral, weight
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None

        def compute() -> Tensor:
            return torch.mm(grad.flatten(0, -2).T, x.flatten(0, -2))

        grad_weight = ctx.deferral.defer(ctx.weight, compute, (grad, x)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None
