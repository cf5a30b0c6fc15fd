"""Stages that sleep instead of computing, so that many ranks can share a few cores at exact costs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.base.registry import load
from launcher.contract.actions import PipelineShape
from launcher.contract.strategy import Schedule
from launcher.runtime.measure.clock import Clock
from launcher.runtime.model.deferred_weight_gradients import DeferredWeightGradient, SplitBackward
from launcher.runtime.process.groups import Group
from launcher.runtime.train.pipeline_executor import PipelineExecutor, PipelinePart
from launcher.schedule.passes import lower
from launcher_plugins.parallel.pipeline.runtime import NeighbourTransport

MESSAGE = (1, 256, 256)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Costs:
    """Seconds of one rank's forward, input gradient and weight gradient, over all its chunks."""

    forward_s: float = 0.025
    input_s: float = 0.025
    weight_s: float = 0.025


@dataclass
class SleepTimes:
    """When every sleep of a rank really began and ended, in the order they ran."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    @property
    def durations(self) -> list[float]:
        return [end - start for start, end in self.spans]

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        if seconds:
            time.sleep(seconds)
        self.spans.append((start, time.perf_counter()))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: SleepingStage) -> Tensor:
        ctx.stage = stage
        stage.times.sleep(stage.costs.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        stage: SleepingStage = ctx.stage
        if stage.deferral.is_enabled:
            stage.times.sleep(stage.costs.input_s)

            def weight_gradient() -> Tensor:
                stage.times.sleep(stage.costs.weight_s)
                return grads[0]

            stage.deferral.defer(stage.weight, weight_gradient, grads)
        else:
            stage.times.sleep(stage.costs.input_s + stage.costs.weight_s)
        return grads[0].contiguous(), torch.zeros(1), None


class SleepingStage(nn.Module):
    """x -> x, taking its time, and little else. The last stage returns the sum where ``sums`` says so."""

    def __init__(
        self, costs: Costs, times: SleepTimes, deferral: SplitBackward, *, sums: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.costs, self.times, self.deferral, self.sums = costs, times, deferral, sums

    def forward(self, x: Tensor | None, microbatch: Any = None) -> Tensor:
        inputs = microbatch if x is None else x
        out: Tensor = _Sleep.apply(inputs, self.weight, self)
        return out.sum() if self.sums else out


class PlainUpdate:
    """Only the backward: nothing is updated."""

    def backward(self, out: Any, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        torch.autograd.backward(out, grad)

    def backward_weight(self, products: list[DeferredWeightGradient], *, chunk: int, last: bool) -> None:
        for product in products:
            product.compute()


@dataclass(frozen=True)
class Measured:
    """One step of one rank."""

    step_s: float
    durations_s: list[float]
    """Every forward and backward, and weight gradient where it is split, in the order of the list."""


class SleepingPipeline:
    """Our executor over sleeping stages on this rank of a process group."""

    def __init__(
        self, schedule: str, shape: PipelineShape, costs: Costs, message: tuple[int, ...] = MESSAGE
    ) -> None:
        self.rank, self.shape, self.times = dist.get_rank(), shape, SleepTimes()
        plugin = load(Schedule, schedule)
        v = shape.num_chunks
        each = Costs(costs.forward_s / v, costs.input_s / v, costs.weight_s / v)
        deferral = SplitBackward(is_enabled=plugin.splits_backward)
        last = shape.num_stages - 1
        part = PipelinePart(
            shape=shape,
            modules={
                stage: SleepingStage(each, self.times, deferral, sums=stage == last)
                for stage in shape.stages(self.rank)
            },
            actions=lower(plugin, shape)[self.rank],
            input_shapes=dict.fromkeys(range(1, shape.num_stages), message),
            deferral=deferral,
            dtype=torch.float32,
            device=CPU,
        )
        self.executor = PipelineExecutor(part, transport(shape.num_pp_ranks), Clock(CPU))
        self.batch = [torch.zeros(message, requires_grad=True) for _ in range(shape.num_microbatches)]

    def step(self) -> Measured:
        """One step from a common start."""
        self.times.spans.clear()
        dist.barrier()
        start = time.perf_counter()
        self.executor.train(self.batch, PlainUpdate(), lambda: 1.0)  # type: ignore[arg-type]
        return Measured(time.perf_counter() - start, self.times.durations)


def transport(num_ranks: int) -> NeighbourTransport:
    """Messages between all ranks of the process group. Collective."""
    everyone = tuple(range(num_ranks))
    down, up = (Group(ranks=everyone, rank=dist.get_rank(), handle=dist.new_group()) for _ in range(2))
    return NeighbourTransport(down, up)
