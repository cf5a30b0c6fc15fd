"""How close our executor, torch's and DeepSpeed's come to the ideal of a schedule, side by side in one run.

    python -m tests.bench.pipeline_executor [--ranks 4] [--microbatches 8] [--repeats 7]

Each rank's stage sleeps 25 ms in a forward and 50 ms in a backward (over all its chunks) and passes
on [1, 256, 256] fp32. The ideal of a step is the simulated makespan of the schedule with the time that
each sleep really took, so that a sleep that oversleeps is charged to nobody; once with free messages,
once with the time of one message measured in the same run. Each repeat runs every executor once, one
after the other; the figures are medians of step / ideal. ZB-H1 runs on ours alone: how much faster than 1F1B
it is stands beside what its simulation says. Last comes the CPU time of the calling thread that an executor
takes itself, per action: measured with stages that do nothing, less what those take alone, with 64
microbatches and with the library's send, receive and wait replaced by ones that do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from launcher.base.registry import load
from launcher.contract.actions import PipelineShape
from launcher.contract.strategy import Schedule
from launcher.runtime.model.deferred_weight_gradients import SplitBackward
from launcher.schedule.passes import lower
from launcher.schedule.simulate import replay
from launcher_plugins.parallel.pipeline.runtime import NeighbourTransport
from tests.bench.sleeping_stages import (
    CPU,
    MESSAGE,
    Costs,
    Measured,
    SleepingPipeline,
    SleepingStage,
    SleepTimes,
    transport,
)
from tests.helpers.ranks import run_ranks

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
TINY = (1, 2, 2)
COSTS, NOTHING = Costs(0.025, 0.025, 0.025), Costs(0.0, 0.0, 0.0)
Step = Callable[[], Measured]


def torchs(schedule: str, shape: PipelineShape, costs: Costs, message: tuple[int, ...] = MESSAGE) -> Step:
    """A step of torch.distributed.pipelining's schedule of the same name."""
    from torch.distributed import pipelining

    rank, p, v, m = dist.get_rank(), shape.num_pp_ranks, shape.num_chunks, shape.num_microbatches
    times, whole = SleepTimes(), SplitBackward(is_enabled=False)
    each = Costs(costs.forward_s / v, costs.input_s / v, costs.weight_s / v)
    stages: list[Any] = [
        pipelining.PipelineStage(
            SleepingStage(each, times, whole), stage, p * v, CPU, input_args=(torch.zeros(message),)
        )
        for stage in shape.stages(rank)
    ]
    loss = lambda out, target: out.sum()  # noqa: E731
    runner = (
        pipelining.Schedule1F1B(stages[0], m, loss_fn=loss)
        if schedule == "1f1b"
        else pipelining.ScheduleInterleaved1F1B(stages, m, loss_fn=loss)
    )
    inputs = torch.zeros((m, *message[1:]), requires_grad=True)
    arguments = (inputs,) if rank == 0 else ()
    targets: dict[str, Any] = {"target": torch.zeros(m)} if rank == p - 1 else {}

    def step() -> Measured:
        times.spans.clear()
        dist.barrier()
        start = time.perf_counter()
        runner.step(*arguments, **targets)
        return Measured(time.perf_counter() - start, times.durations)

    return step


def deepspeeds(shape: PipelineShape, costs: Costs) -> Step:
    """A step of DeepSpeed's PipelineEngine, which runs 1F1B."""
    times, whole = SleepTimes(), SplitBackward(is_enabled=False)
    stages = [SleepingStage(costs, times, whole) for _ in range(shape.num_pp_ranks)]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its partition
        pipeline = PipelineModule(
            layers=stages,
            num_stages=shape.num_pp_ranks,
            loss_fn=lambda out, target: out.sum(),
            partition_method="uniform",
        )
        engine, *_ = deepspeed.initialize(
            model=pipeline,
            optimizer=torch.optim.SGD(pipeline.parameters(), lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": shape.num_microbatches,
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            },
        )
    batches = ((torch.zeros(MESSAGE, requires_grad=True), torch.zeros(1)) for _ in itertools.count())

    def step() -> Measured:
        times.spans.clear()
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(batches)
        return Measured(time.perf_counter() - start, times.durations)

    return step


def message_s(wire: NeighbourTransport) -> float:
    """Median half round trip of one message between the first two ranks."""
    message, rank = torch.zeros(MESSAGE), dist.get_rank()
    trips = []
    for tag in range(20):
        start = time.perf_counter()
        if rank < 2:
            order = (wire.send, wire.receive) if rank == 0 else (wire.receive, wire.send)
            for move in order:
                move(message, 1 - rank, tag).wait()
        trips.append((time.perf_counter() - start) / 2)
    return statistics.median(trips)


def rank_main(rank: int, p: int, m: int, repeats: int) -> dict[str, object]:
    """Runs every executor in turn, ``repeats`` times after a warm-up."""
    shapes = {
        "1f1b": PipelineShape(num_pp_ranks=p, num_microbatches=m),
        "interleaved_1f1b": PipelineShape(num_pp_ranks=p, num_chunks=2, num_microbatches=m),
    }
    makers = {"ours": lambda *job: SleepingPipeline(*job).step, "torch": torchs}
    steps = {
        f"{name} {who}": make(name, shape, COSTS)
        for name, shape in shapes.items()
        for who, make in makers.items()
    }
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(p)}
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False)
    steps["zb_h1 ours"] = SleepingPipeline("zb_h1", shapes["1f1b"], COSTS).step
    steps["1f1b deepspeed"] = deepspeeds(shapes["1f1b"], COSTS)
    many = {name: replace(shape, num_microbatches=64) for name, shape in shapes.items()}
    idle = {
        f"{name} {who}": make(name, shape, NOTHING, TINY)
        for name, shape in many.items()
        for who, make in makers.items()
    }
    wire = transport(p)
    rounds, messages_s = [], []
    for _ in range(repeats + 1):
        rounds.append({name: step() for name, step in steps.items()})
        messages_s.append(message_s(wire))
    cpu = cpu_us(idle | {"bare": bare_loop(many["1f1b"])})
    return {
        "rounds": rounds[1:],
        "message_s": statistics.median(messages_s),
        "cpu_us": {name: taken - cpu["bare"] for name, taken in cpu.items()},
    }


def bare_loop(shape: PipelineShape) -> Step:
    """The forwards and backwards of one stage, without messages and without an executor."""
    times = SleepTimes()
    stage = SleepingStage(NOTHING, times, SplitBackward(is_enabled=False), sums=True)
    batch = [torch.zeros(TINY, requires_grad=True) for _ in range(shape.num_microbatches)]

    def step() -> Measured:
        times.spans.clear()
        for microbatch in batch:
            torch.autograd.backward(stage(None, microbatch))
        return Measured(0.0, times.durations)

    return step


class _Done:
    """Stands for a message that has come or gone."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextlib.contextmanager
def no_messages() -> Iterator[None]:
    """Sends, receives and barriers that do nothing: no thread sleeps, what is left is an executor's own."""
    places: list[tuple[Any, str]] = [
        (dist.ProcessGroup, "send"),
        (dist.ProcessGroup, "recv"),
        (dist, "barrier"),
    ]
    kept = [vars(owner)[name] for owner, name in places]
    for owner, name in places:
        setattr(owner, name, lambda *_, **__: _Done())
    try:
        yield
    finally:
        for (owner, name), call in zip(places, kept, strict=True):
            setattr(owner, name, call)


def cpu_us(steps: Mapping[str, Step], repeats: int = 30) -> dict[str, float]:
    """Microseconds of the calling thread's CPU per forward or backward of stages that do nothing: medians,
    the steps taken in turn."""
    for step in steps.values():
        step()  # with messages: torch's stages learn their peers' shapes in it
    taken: dict[str, list[float]] = {name: [] for name in steps}
    with no_messages():
        for _ in range(repeats):
            for name, step in steps.items():
                start = time.thread_time()
                num_actions = len(step().durations_s)
                taken[name].append((time.thread_time() - start) / num_actions * 1e6)
    return {name: statistics.median(each) for name, each in taken.items()}


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
    transfer_s = ranks[0]["message_s"]
    print(f"{p} ranks, {m} microbatches; a message takes {transfer_s * 1e6:.0f} us")
    print(f"medians of {options.repeats} (lowest to highest)")
    print(f"  {'':24} step / ideal              with messages  own CPU per action")
    taken: dict[str, list[float]] = {}
    ideal: dict[str, list[float]] = {}
    for name in ranks[0]["rounds"][0]:
        chunks = 2 if name.startswith("interleaved") else 1
        shape = PipelineShape(num_pp_ranks=p, num_chunks=chunks, num_microbatches=m)
        lists = lower(load(Schedule, name.split()[0]), shape)
        free, real = [], []
        for repeat in range(options.repeats):
            measured = [rank["rounds"][repeat][name] for rank in ranks]
            step_s, times = max(one.step_s for one in measured), [one.durations_s for one in measured]
            ideal_s = replay(lists, shape, times, transfer_s=0.0).makespan_s
            taken.setdefault(name, []).append(step_s)
            ideal.setdefault(name, []).append(ideal_s)
            free.append(step_s / ideal_s)
            real.append(step_s / replay(lists, shape, times, transfer_s=transfer_s).makespan_s)
        own = [rank["cpu_us"][name] for rank in ranks if name in rank["cpu_us"]]
        cpu = f"{statistics.mean(own):6.0f} us" if own else "     -"
        low, middle, high = min(free), statistics.median(free), max(free)
        spread = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        print(f"  {name:24} {spread:25} {statistics.median(real):.3f}          {cpu}")
    gains = [
        statistics.median(one / other for one, other in zip(of["1f1b ours"], of["zb_h1 ours"], strict=True))
        for of in (taken, ideal)
    ]
    print("  1f1b / zb_h1: measured {:.3f}, by simulation {:.3f}".format(*gains))
    print(f"load average after: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
