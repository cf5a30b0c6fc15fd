"""A model on a device of which everything is known: matrix products that take as long as they are told.

Each layer is one real matrix product, followed by a sleep until the time is over that its operations take
at ``flops_per_s``; the backward takes twice as long. Sleeping ranks share few cores without slowing each
other down, so a pipeline of many ranks shows on a small machine what its schedule does. With the same
number as `device.peak_flops`, the plan predicts the very times.

    model: {target: "launcher.runtime.slow_device:build", options: {flops_per_s: 4e8}}
    data: {target: "launcher.runtime.slow_device:Points"}
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class SlowLinear(nn.Module):
    """hidden [..., width] -> [..., width], at ``flops_per_s`` operations a second."""

    def __init__(self, width: int, flops_per_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width) + torch.randn(width, width) / width)
        self.flops_per_s = flops_per_s

    def forward(self, hidden: Tensor) -> Tensor:
        """The product with the weight, and the rest of its time asleep."""
        seconds = 2 * hidden.numel() * self.weight.shape[0] / self.flops_per_s
        out: Tensor = _SlowProduct.apply(hidden, self.weight, seconds)  # type: ignore[no-untyped-call]
        return out


class SlowModel:
    """Equal layers, and the loss of what the last one gives."""

    def __init__(self, num_layers: int, width: int, flops_per_s: float) -> None:
        self.layers = [SlowLinear(width, flops_per_s) for _ in range(num_layers)]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Output [batch, rows, width] and targets [batch] -> sum of the squared distances of its means."""
        return (output.mean(dim=(1, 2)) - targets).square().sum()


def build(num_layers: int = 16, width: int = 64, *, flops_per_s: float) -> SlowModel:
    """The model, for ``model.target``."""
    return SlowModel(num_layers, width, flops_per_s)


class Points:
    """Samples [rows, width] of noise, each with a target, for ``data.target``."""

    def __init__(self, num_samples: int = 256, rows: int = 256, width: int = 64) -> None:
        self._num_samples, self._shape = num_samples, (rows, width)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self._shape, generator=generator), torch.tensor(index / self._num_samples)


class _SlowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.seconds = seconds
        with _lasting(seconds):
            return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        hidden, weight = ctx.saved_tensors
        with _lasting(2 * ctx.seconds):
            return grad @ weight, grad.flatten(0, -2).T @ hidden.flatten(0, -2), None


@contextmanager
def _lasting(seconds: float) -> Iterator[None]:
    """Leaves once the seconds are over."""
    end = time.perf_counter() + seconds
    yield
    time.sleep(max(0.0, end - time.perf_counter()))
