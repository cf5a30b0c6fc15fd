"""The interpreter of action lists: buffers, messages, evaluation, and any valid list."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.base.registry import load
from launcher.contract.actions import PipelineShape
from launcher.contract.strategy import Schedule
from launcher.runtime.measure.clock import Clock
from launcher.runtime.model.deferred_weight_gradients import SplitBackward
from launcher.runtime.process.groups import Group
from launcher.runtime.train.pipeline_executor import PipelineExecutor, PipelinePart
from launcher.schedule.passes import lower
from launcher_plugins.parallel.pipeline.runtime import NeighbourTransport
from tests.helpers.objects import inside
from tests.helpers.ranks import RankError, run_ranks

CPU = torch.device("cpu")
SIZE = (1, 4)


class Stage(nn.Module):
    """x -> x * weight, the sum on the last stage; an identity where it has no weight."""

    def __init__(self, weight: float | None, *, is_last: bool) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(torch.tensor(weight))
        self.is_last = is_last

    def forward(self, x: Tensor | None, microbatch: Tensor) -> Tensor:
        out = microbatch if x is None else x
        out = out if self.weight is None else out * self.weight
        return out.sum() if self.is_last else out


class ViewStage(nn.Module):
    """A stage whose backward is a view: the gradient of its input lies in the buffer of its output's."""

    def forward(self, x: Tensor, microbatch: Tensor) -> Tensor:
        return x.view(SIZE)


class WideStage(nn.Module):
    """Passes on another format than was planned."""

    def forward(self, x: Tensor | None, microbatch: Tensor) -> Tensor:
        return microbatch.double()


class PlainUpdate:
    """Only the backward; remembers which were said to be a chunk's last."""

    def __init__(self) -> None:
        self.lasts: list[tuple[int, bool]] = []

    def backward(self, out: Tensor, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        self.lasts.append((chunk, last))
        torch.autograd.backward(out, grad)


def executor(rank: int, schedule: str, shape: PipelineShape, weights: list[float | None]) -> PipelineExecutor:
    everyone = tuple(range(shape.num_pp_ranks))
    groups = [Group(ranks=everyone, rank=rank, handle=dist.new_group()) for _ in range(2)]
    last = shape.num_stages - 1
    part = PipelinePart(
        shape=shape,
        modules={stage: Stage(weights[stage], is_last=stage == last) for stage in shape.stages(rank)},
        actions=lower(load(Schedule, schedule), shape)[rank],
        input_shapes=dict.fromkeys(range(1, shape.num_stages), SIZE),
        deferral=SplitBackward(is_enabled=False),
        dtype=torch.float32,
        device=CPU,
    )
    return PipelineExecutor(part, NeighbourTransport(*groups), Clock(CPU))


def batches(shape: PipelineShape) -> list[Tensor]:
    return [torch.full(SIZE, float(index + 1), requires_grad=True) for index in range(shape.num_microbatches)]


def train_twice(rank: int, schedule: str, shape: PipelineShape) -> dict[str, Any]:
    runner = executor(rank, schedule, shape, [2.0] * shape.num_stages)
    update = PlainUpdate()
    allocated, receives = [], []
    for _ in range(2):
        result = runner.train(batches(shape), update, loss_scale=lambda: 0.5)  # type: ignore[arg-type]
        allocated.append(runner.pool.num_allocated)
        receives.append(result.num_receives)
    gradients = [float(module.weight.grad) for module in runner._part.modules.values()]  # type: ignore[arg-type]
    loss = None if result.loss_sum is None else float(result.loss_sum)
    return {
        "allocated": allocated,
        "receives": receives,
        "gradients": gradients,
        "loss": loss,
        "lasts": update.lasts,
    }


SHAPES = {
    "gpipe": PipelineShape(num_pp_ranks=3, num_microbatches=5),
    "1f1b": PipelineShape(num_pp_ranks=3, num_microbatches=5),
    "interleaved_1f1b": PipelineShape(num_pp_ranks=2, num_chunks=2, num_microbatches=4),
}


@pytest.mark.parametrize("schedule", SHAPES)
def test_every_schedule_gives_the_gradients_of_the_whole_model(schedule: str) -> None:
    shape = SHAPES[schedule]
    results = run_ranks(shape.num_pp_ranks, train_twice, schedule, shape)
    inputs = sum(SIZE[1] * (index + 1) for index in range(shape.num_microbatches))
    factor = 2.0**shape.num_stages
    assert results[-1]["loss"] == inputs * factor
    expected = 2 * 0.5 * inputs * factor / 2  # two steps, loss_scale, one weight less
    assert all(gradient == expected for result in results for gradient in result["gradients"])


@pytest.mark.parametrize("schedule", SHAPES)
def test_no_receive_buffer_is_allocated_after_the_first_step(schedule: str) -> None:
    shape = SHAPES[schedule]
    for result in run_ranks(shape.num_pp_ranks, train_twice, schedule, shape):
        first, second = result["allocated"]
        assert first == second
        assert first <= sum(result["receives"]) // 2


def test_1f1b_needs_fewer_buffers_than_gpipe() -> None:
    shape = PipelineShape(num_pp_ranks=3, num_microbatches=8)
    allocated = {
        schedule: run_ranks(3, train_twice, schedule, shape)[1]["allocated"][0]
        for schedule in ("gpipe", "1f1b")
    }
    assert allocated["1f1b"] < allocated["gpipe"]


def test_each_chunk_is_told_its_last_backward_once_a_step() -> None:
    shape = SHAPES["interleaved_1f1b"]
    for result in run_ranks(2, train_twice, "interleaved_1f1b", shape):
        for chunk in range(2):
            flags = [last for which, last in result["lasts"] if which == chunk]
            assert flags == ([False] * 3 + [True]) * 2


def evaluate_identity(rank: int, shape: PipelineShape) -> float | None:
    runner = executor(rank, "gpipe", shape, [None, None, None])
    total = runner.evaluate([batch.detach() for batch in batches(shape)])
    return None if total is None else float(total)


def test_evaluation_is_right_where_a_stage_hands_on_its_own_input() -> None:
    shape = PipelineShape(num_pp_ranks=3, num_microbatches=6)
    assert run_ranks(3, evaluate_identity, shape)[-1] == 4 * (1 + 2 + 3 + 4 + 5 + 6)


def through_a_view(rank: int, shape: PipelineShape) -> float:
    runner = executor(rank, "interleaved_1f1b", shape, [2.0] * shape.num_stages)
    if rank == 1:
        inside(runner._part.modules)[1] = ViewStage()
    if rank == 0:  # slow to take its gradients, so that they are long under way
        module = runner._part.modules[0]
        module.register_full_backward_hook(lambda *_: time.sleep(0.02))
    runner.train(batches(shape), PlainUpdate(), loss_scale=lambda: 1.0)  # type: ignore[arg-type]
    module = runner._part.modules[rank + 4 if rank else 0]
    return float(inside(module).weight.grad)


def test_a_gradient_under_way_is_not_written_over_by_the_next() -> None:
    shape = PipelineShape(num_pp_ranks=4, num_chunks=2, num_microbatches=8)
    inputs = sum(SIZE[1] * (index + 1) for index in range(shape.num_microbatches))
    expected = inputs * 2.0 ** (shape.num_stages - 2)  # one stage is a view, one weight is less
    assert run_ranks(4, through_a_view, shape)[0] == expected


def outputs_alive_at_the_first_backward(rank: int, shape: PipelineShape) -> int:
    runner = executor(rank, "gpipe", shape, [2.0, 2.0])
    outputs: list[weakref.ref[Tensor]] = []
    runner._part.modules[rank].register_forward_hook(lambda m, i, out: outputs.append(weakref.ref(out)))

    class Counting(PlainUpdate):
        num_alive = -1

        def backward(self, out: Any, grad: Tensor | None, *, chunk: int, last: bool) -> None:
            if self.num_alive < 0:
                self.num_alive = sum(output() is not None for output in outputs)
            super().backward(out, grad, chunk=chunk, last=last)

    update = Counting()
    runner.train(batches(shape), update, loss_scale=lambda: 1.0)  # type: ignore[arg-type]
    return update.num_alive


def test_an_output_is_let_go_once_it_was_sent() -> None:
    shape = PipelineShape(num_pp_ranks=2, num_microbatches=12)
    num_alive, _ = run_ranks(2, outputs_alive_at_the_first_backward, shape)
    assert num_alive <= 1  # the graph of all twelve is there; of the outputs at most the newest


def pass_on_doubles(rank: int) -> None:
    runner = executor(rank, "gpipe", PipelineShape(num_pp_ranks=2, num_microbatches=1), [2.0, 2.0])
    if rank == 0:
        inside(runner._part.modules)[0] = WideStage()
    # The other waits for what it never gets: were it to end, the first might still be connecting to it.
    runner.train(batches(runner._part.shape), PlainUpdate(), loss_scale=lambda: 1.0)  # type: ignore[arg-type]


def test_a_stage_that_passes_on_what_was_not_planned_is_named() -> None:
    with pytest.raises(
        RankError, match=r"stage 0 sends \(1, 4\) torch\.float64, planned is \(1, 4\) torch\.float32"
    ):
        run_ranks(2, pass_on_doubles)
