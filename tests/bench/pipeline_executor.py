"""How close our executor and torch's come to the ideal of a schedule, side by side in one run.

    python tests/bench/pipeline_executor.py [--ranks 4] [--microbatches 8] [--repeats 7]

Each rank's stage sleeps 25 ms in a forward and 50 ms in a backward (over all its chunks) and passes
on [1, 256, 256] fp32. The ideal of a step is the simulated makespan of the schedule with the time that
each sleep really took and free messages, so that a sleep that oversleeps is charged to nobody. Each
repeat runs every executor once, one after the other; the figures are medians of step / ideal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "runtime")]
from ranks import run_ranks
from sleeping_stages import SleepingStage, SleepTimes

from launcher.registry import load
from launcher.runtime.groups import Group
from launcher.runtime.metrics import Clock
from launcher.runtime.pipeline import PipelineExecutor, PipelinePart
from launcher.runtime.split_backward import SplitBackward
from launcher.schedule.actions import PipelineShape
from launcher.schedule.passes import lower
from launcher.schedule.simulate import replay
from launcher_plugins.parallel.pipeline_runtime import NeighbourTransport

FORWARD_S, BACKWARD_S = 0.025, 0.050
MESSAGE = (1, 256, 256)
Step = Callable[[], None]


class PlainUpdate:
    """Only the backward: nothing is updated."""

    def backward(self, out: Tensor, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        torch.autograd.backward(out, grad)


def ours(shape: PipelineShape, schedule: str, times: SleepTimes, groups: tuple[Group, Group]) -> Step:
    """A step of our executor."""
    rank, p, v = dist.get_rank(), shape.num_pp_ranks, shape.num_chunks
    last = shape.num_stages - 1
    part = PipelinePart(
        shape=shape,
        modules={
            stage: SleepingStage(FORWARD_S / v, BACKWARD_S / v, times, sums=stage == last)
            for stage in range(rank, p * v, p)
        },
        actions=lower(load("launcher.schedules", schedule), shape)[rank],
        input_shapes=dict.fromkeys(range(1, p * v), MESSAGE),
        split=SplitBackward(is_enabled=False),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    executor = PipelineExecutor(part, NeighbourTransport(*groups), Clock(torch.device("cpu")))
    batch = [torch.zeros(MESSAGE, requires_grad=True) for _ in range(shape.num_microbatches)]
    return lambda: executor.train(batch, PlainUpdate(), 1.0) and None  # type: ignore[arg-type]


def torchs(shape: PipelineShape, schedule: str, times: SleepTimes) -> Step:
    """A step of torch.distributed.pipelining's schedule of the same name."""
    from torch.distributed import pipelining

    rank, p, v, m = dist.get_rank(), shape.num_pp_ranks, shape.num_chunks, shape.num_microbatches
    device = torch.device("cpu")
    example = torch.zeros(MESSAGE)
    stages = [
        pipelining.PipelineStage(
            SleepingStage(FORWARD_S / v, BACKWARD_S / v, times), stage, p * v, device, input_args=(example,)
        )
        for stage in range(rank, p * v, p)
    ]
    times.spans.clear()
    loss = lambda out, target: out.sum()  # noqa: E731
    runner = (
        pipelining.Schedule1F1B(stages[0], m, loss_fn=loss)
        if v == 1
        else pipelining.ScheduleInterleaved1F1B(stages, m, loss_fn=loss)
    )
    inputs = torch.zeros((m, *MESSAGE[1:]), requires_grad=True)

    def step() -> None:
        arguments = (inputs,) if rank == 0 else ()
        targets = {"target": torch.zeros(m)} if rank == p - 1 else {}
        runner.step(*arguments, **targets)

    return step


def timed(step: Step, times: SleepTimes) -> tuple[float, list[float]]:
    """Seconds of one step from a common start, and the sleeps in it."""
    times.spans.clear()
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start, list(times.spans)


def rank_main(rank: int, p: int, m: int, repeats: int) -> dict[str, list[tuple[float, list[float]]]]:
    """Runs every executor in turn, ``repeats`` times after a warm-up."""
    everyone = tuple(range(p))
    groups = tuple(Group(ranks=everyone, rank=rank, handle=dist.new_group()) for _ in range(2))
    times = SleepTimes()
    plain = PipelineShape(num_pp_ranks=p, num_microbatches=m)
    chunked = PipelineShape(num_pp_ranks=p, num_chunks=2, num_microbatches=m)
    steps = {
        "1f1b ours": ours(plain, "1f1b", times, groups),  # type: ignore[arg-type]
        "1f1b torch": torchs(plain, "1f1b", times),
        "interleaved_1f1b ours": ours(chunked, "interleaved_1f1b", times, groups),  # type: ignore[arg-type]
        "interleaved_1f1b torch": torchs(chunked, "interleaved_1f1b", times),
    }
    results: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            result = timed(step, times)
            if repeat:
                results[name].append(result)
    return results


def main() -> None:
    """Prints a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    p, m = options.ranks, options.microbatches
    print(f"load average before: {os.getloadavg()[0]:.2f} on {len(os.sched_getaffinity(0))} cores")
    ranks = run_ranks(p, rank_main, p, m, options.repeats, timeout_s=600)
    print(f"{p} ranks, {m} microbatches, medians of {options.repeats}: step / ideal (lowest to highest)")
    for name in ranks[0]:
        chunks = 2 if name.startswith("interleaved") else 1
        shape = PipelineShape(num_pp_ranks=p, num_chunks=chunks, num_microbatches=m)
        lists = lower(load("launcher.schedules", name.split()[0]), shape)
        ratios = []
        for repeat in range(options.repeats):
            step_s = max(rank[name][repeat][0] for rank in ranks)
            ideal = replay(lists, shape, [rank[name][repeat][1] for rank in ranks], transfer_s=0.0)
            ratios.append(step_s / ideal.makespan_s)
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"  {name:24} {middle:.3f}  ({low:.3f} to {high:.3f})")
    print(f"load average after: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
