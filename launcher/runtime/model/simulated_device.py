"""A model on a simulated device of known speed: matrix products that take as long as their flops say.

Each layer is one real matrix product and a ReLU, followed by a sleep until the time is over that its
operations take at ``flops_per_s``; the gradient of its input takes as long, and so does that of its weight,
which a schedule may defer. Sleeping ranks share few cores without slowing each other down, so a pipeline
of many ranks shows on a small machine what its schedule does. With the same number as `device.peak_flops`,
the plan predicts exactly these times.

For its backward a layer saves its input and ``num_kept`` tensors like its output, as a transformer layer
does for its norms and attention; a deferred weight gradient reads two tensors.

    model: {target: "launcher.runtime.model.simulated_device:build", options: {flops_per_s: 4e8}}
    data: {target: "launcher.runtime.model.simulated_device:Points"}
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from launcher.runtime.model.deferred_weight_gradients import SplitBackward


class SimulatedLinear(nn.Module):
    """hidden [..., width] -> [..., width], at ``flops_per_s`` operations a second."""

    def __init__(self, width: int, flops_per_s: float, num_kept: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width) + torch.randn(width, width) / width)
        self.flops_per_s, self.num_kept = flops_per_s, num_kept
        self.deferral = SplitBackward(is_enabled=False)

    def split_with(self, deferral: SplitBackward) -> None:
        """Defers the weight gradient where the schedule splits the backward."""
        self.deferral = deferral

    def forward(self, hidden: Tensor) -> Tensor:
        """The ReLU of the product with the weight; sleeps for the rest of its time."""
        out: Tensor = _SimulatedProduct.apply(hidden, self.weight, self)  # type: ignore[no-untyped-call]
        return out

    def seconds(self, hidden: Tensor) -> float:
        """Time of one product with an input."""
        return 2 * hidden.numel() * self.weight.shape[0] / self.flops_per_s


class SimulatedModel:
    """Equal layers, and a loss."""

    def __init__(self, num_layers: int, width: int, flops_per_s: float, num_kept: int) -> None:
        self.layers = [SimulatedLinear(width, flops_per_s, num_kept) for _ in range(num_layers)]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Output [batch, rows, width] and targets [batch] -> sum of the squared distances of its means."""
        return (output.mean(dim=(1, 2)) - targets).square().sum()


def build(num_layers: int = 16, width: int = 64, num_kept: int = 1, *, flops_per_s: float) -> SimulatedModel:
    """The model, for ``model.target``."""
    return SimulatedModel(num_layers, width, flops_per_s, num_kept)


class Points:
    """Samples [rows, width] of noise, each with a target, for ``data.target``."""

    def __init__(self, num_samples: int = 256, rows: int = 256, width: int = 64) -> None:
        self._num_samples, self._shape = num_samples, (rows, width)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self._shape, generator=generator), torch.tensor(index / self._num_samples)


class _SimulatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: nn.Parameter, layer: SimulatedLinear) -> Tensor:
        with _lasting(layer.seconds(hidden)):
            product = hidden @ weight.T
            kept = product.repeat(layer.num_kept, *[1] * product.dim())
            ctx.save_for_backward(hidden, weight, kept)
            ctx.layer, ctx.weight = layer, weight
            out: Tensor = product.relu_()
            return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight, kept = ctx.saved_tensors
        layer: SimulatedLinear = ctx.layer
        with _lasting(layer.seconds(hidden)):
            grad = grads[0] * (kept[0] > 0)
            grad_hidden = grad @ weight

        def weight_gradient() -> Tensor:
            with _lasting(layer.seconds(hidden)):
                grad_weight: Tensor = grad.flatten(0, -2).T @ hidden.flatten(0, -2)
            return grad_weight

        return grad_hidden, layer.deferral.defer(ctx.weight, weight_gradient, (grad, hidden)), None


@contextmanager
def _lasting(seconds: float) -> Iterator[None]:
    """Sleeps at the end until the seconds are over."""
    end = time.perf_counter() + seconds
    yield
    time.sleep(max(0.0, end - time.perf_counter()))
