"""A training step with and without each kind of operator fusion.

    python -m tests.bench.operator_fusion [--repeats 7] [--seq 256]

One rank with one thread trains the same model under every choice of ``fusion``. In each repeat every choice
makes one step, in an order that turns from repeat to repeat, so that all of them meet the same load. Printed
are the median of a step and the median of the ratios to the plan's default within each repeat, above 1 where
the default is faster. Steps in which layers are compiled are left out, and their time is printed apart. The
update alone is timed too, since of a whole step it is a small part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch

from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import job
from tests.helpers.objects import inside
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
DEFAULT = "default: all fused, not compiled"
CHOICES: dict[str, dict[str, str]] = {
    DEFAULT: {},
    "optimizer=foreach": {"optimizer": "foreach"},
    "optimizer=loop": {"optimizer": "loop"},
    "attention=plain": {"attention": "plain"},
    "compile=block": {"compile": "block"},
    "attention=plain compile=block": {"attention": "plain", "compile": "block"},
}
NUM_WARMUP = 2


class Timed:
    """One choice, trained step by step."""

    def __init__(self, fusion: dict[str, str], seq: int) -> None:
        plan = job(
            model={"num_layers": 4, "hidden_size": 256, "num_heads": 4},
            data={"source": "package:pydoc_data/topics.py"},
            batch={"global_size": 4, "micro_size": 4, "seq_length": seq},
            parallel={"bucket_bytes": 1 << 26},
            report={"warmup_steps": 1},
            fusion=fusion,
        )
        ctx = make_context(plan.rank(0), CPU)
        self.trainer, self.steps = Trainer(ctx), Loader(ctx).steps(0)
        self.number = 0
        self.update_s = 0.0
        self._time_the_update()
        self.first_s = self.step_s()
        for _ in range(NUM_WARMUP):
            self.step_s()

    def step_s(self) -> float:
        """Seconds of the next step."""
        batch = next(self.steps)
        start = time.perf_counter()
        self.trainer.step(self.number, batch)
        self.number += 1
        return time.perf_counter() - start

    def _time_the_update(self) -> None:
        optimizer: Any = inside(self.trainer.update)._optimizer
        step = optimizer.step

        def timed() -> None:
            start = time.perf_counter()
            step()
            self.update_s = time.perf_counter() - start

        optimizer.step = timed


def measure(rank: int, repeats: int, seq: int) -> dict[str, Any]:
    """Seconds of every step and update, and of the first step, by choice."""
    timed = {name: Timed(fusion, seq) for name, fusion in CHOICES.items()}
    names = list(timed)
    found: dict[str, Any] = {name: {"step": [], "update": [], "first": timed[name].first_s} for name in names}
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            found[name]["step"].append(timed[name].step_s())
            found[name]["update"].append(timed[name].update_s)
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seq", type=int, default=256)
    options = parser.parse_args()
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"load average {load:.2f} on {cores} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # empty: the first step compiles, as it does once
        (found,) = run_ranks(1, measure, options.repeats, options.seq, timeout_s=600)
    print(f"{'':32} {'step':>9} {'of default':>24} {'update':>9} {'of default':>24} {'first step':>11}")
    for name, times in found.items():
        cells = [f"{name:32}"]
        for what in ("step", "update"):
            ratios = [one / other for one, other in zip(times[what], found[DEFAULT][what], strict=True)]
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            cells.append(f"{statistics.median(times[what]) * 1e3:6.1f} ms {spread:>24}")
        print(" ".join([*cells, f"{times['first']:9.1f} s"]))


if __name__ == "__main__":
    main()
