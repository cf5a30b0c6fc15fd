"""What the check of token ids costs: reading a step's data with and without it, beside the training step.

    python -m tests.bench.token_ids [--repeats 21]

One rank with one thread reads and trains. In each repeat a step's data are read with the check and without
it, in turn; printed are the medians, and what the check adds as a share of reading and of the whole step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch

from launcher.base.machine import cpu_model
from launcher.runtime.data import microbatches
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import job
from tests.helpers.ranks import run_ranks

SEQ, SAMPLES = 1024, 8


def measure(rank: int, repeats: int, cache: str) -> dict[str, list[float]]:
    """Seconds of reading with and without the check, and of the step."""
    plan = job(
        model={"num_layers": 2, "hidden_size": 64, "num_heads": 4},
        data={"source": "package:pydoc_data/topics.py", "cache_dir": cache, "prefetch_batches": 0},
        batch={"global_size": SAMPLES, "micro_size": SAMPLES, "seq_length": SEQ},
        report={"warmup_steps": 1},
    )
    ctx = make_context(plan.rank(0), torch.device("cpu"))
    steps, trainer = Loader(ctx).steps(0), Trainer(ctx)
    reading = vars(microbatches)
    check = reading["check_ids"]
    found: dict[str, list[float]] = {"with": [], "without": [], "step": []}
    for repeat in range(2 * repeats + 2):
        name = ("with", "without")[(repeat + repeat // 2) % 2]  # which is the first turns
        reading["check_ids"] = check if name == "with" else lambda *given: None
        start = time.perf_counter()
        batch = next(steps)
        read = time.perf_counter()
        if repeat >= 2:  # the first ones import and allocate
            found[name].append(read - start)
        trainer.step(repeat, batch)
        found["step"].append(time.perf_counter() - read)
    reading["check_ids"] = check
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as cache:
        (found,) = run_ranks(1, measure, repeats, cache, timeout_s=600)
    checked, plain, step = (statistics.median(found[name]) for name in ("with", "without", "step"))
    spread = statistics.pstdev(found["with"])
    print(f"{cpu_model()}, torch {torch.__version__}, {SAMPLES} samples of {SEQ} tokens, {repeats} repeats")
    added, of_reading = 1e6 * (checked - plain), f"{1e6 * checked:.0f} (spread {1e6 * spread:.0f})"
    print(f"reading: {of_reading} us with the check, {1e6 * plain:.0f} us without")
    share = (checked - plain) / (step + plain)
    print(f"the check adds {added:.0f} us, {share:.3%} of a step of {1e3 * step:.0f} ms")


if __name__ == "__main__":
    main()
