"""Stages that sleep instead of computing, so that many ranks can share a few cores at exact costs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class SleepTimes:
    """Seconds that every forward and backward of a rank really took, in the order they ran."""

    spans: list[float] = field(default_factory=list)


def sleep(seconds: float, times: SleepTimes) -> None:
    start = time.perf_counter()
    time.sleep(seconds)
    times.spans.append(time.perf_counter() - start)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float, times: SleepTimes) -> Tensor:
        ctx.backward_s, ctx.times = backward_s, times
        sleep(forward_s, times)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sleep(ctx.backward_s, ctx.times)
        return grads[0].clone(), None, None, None


class SleepingStage(nn.Module):
    """x -> x, taking its time. The last stage returns the sum where ``sums`` says so."""

    def __init__(self, forward_s: float, backward_s: float, times: SleepTimes, *, sums: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.forward_s, self.backward_s, self.times, self.sums = forward_s, backward_s, times, sums

    def forward(self, x: Tensor | None, microbatch: Any = None) -> Tensor:
        inputs = microbatch if x is None else x
        out: Tensor = _Sleep.apply(inputs + self.weight, self.forward_s, self.backward_s, self.times)
        return out.sum() if self.sums else out
