"""Neighbour averaging measured: how much of the exchange of weights the compute hides.

    python -m tests.bench.gossip      four replicas that sleep, over emulated links (root)

Every number is a median over steps and replicas, and the ways take turns. Ranks run the real update, with
layers that sleep instead of computing.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from launcher.contract.plan import Plan
from launcher.runtime.process.rank import make_context
from launcher_plugins.architectures.gossip.runtime import update
from tests.bench.emulated_links import links, run_behind_links
from tests.bench.parameter_server import CPU, Sleeper, Work
from tests.helpers.equality import job

REPLICAS, RATE, ROUNDS = 4, 10e6, 3


def plan_of(work: Work) -> Plan:
    """A plan for the sleeping layers: one bucket for each."""
    return job(
        parallel={"dp": REPLICAS, "bucket_bytes": 4 * work.layer_numel},
        architecture={"name": "gossip"},
        train={"num_steps": 10_000},
        run={"timeout_s": 60.0},
    )


def steps_s(rank: int, plan: Plan, work: Work, overlaps: bool) -> list[float]:
    """Seconds of each step of a replica, the first two left out. Without overlap the weights leave when the
    gradient is there."""
    replica = update(make_context(plan.rank(rank), CPU))
    model = nn.Sequential(*(Sleeper(index, work) for index in range(work.num_layers)))
    replica.prepare([model])
    taken = []
    for step in range(work.num_steps + 2):
        dist.barrier()
        start = time.perf_counter()
        if overlaps:
            replica.begin(step)
        loss = model(torch.zeros(1, requires_grad=True)).sum()
        replica.backward(loss, None, chunk=0, last=True)
        if not overlaps:
            replica.begin(step)
        replica.apply(step)
        taken.append(time.perf_counter() - start)
    return taken[2:]


def main() -> None:
    """Prints one line for each length of the compute, beside what hiding all of the exchange would give."""
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, torch {torch.__version__}")
    still = Work(num_layers=5, layer_numel=125_000, num_steps=4)
    exchange_s = 2 * still.num_bytes / RATE
    print(
        f"{REPLICAS} replicas on a ring, links of {RATE / 1e6:g} MB/s, {still.num_bytes / 1e6:g} MB to each "
        f"neighbour: {exchange_s:.3f} s by the rate"
    )
    print("compute   exchange alone   one after the other   overlapped        hidden")
    with links(REPLICAS, RATE):
        for compute_s in (0.25, 0.5, 0.75):
            work = replace(still, forward_s=compute_s / 3, backward_s=compute_s * 2 / 3)
            ways = {"alone": (still, False), "after": (work, False), "overlapped": (work, True)}
            found: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(ROUNDS):
                for name, (each, overlaps) in ways.items():
                    rows = run_behind_links(REPLICAS, steps_s, plan_of(each), each, overlaps)
                    found[name] += [seconds for row in rows for seconds in row]
            alone, after, overlapped = (statistics.median(values) for values in found.values())
            best = max(compute_s, alone)
            print(
                f"{compute_s:7.3f}   {alone:14.3f}   {after:19.3f}   {overlapped:.3f} / {best:.3f} "
                f"({overlapped / best - 1:+.0%})   {(after - overlapped) / min(compute_s, alone):.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
