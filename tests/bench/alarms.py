"""What the alarms cost a step of a rank, beside the step.

    python -m tests.bench.alarms [--steps 400]

Two ranks of one stage each (parallel.pp=2) train tiny steps with all alarms at their default windows. Printed
are the medians of the step; of judging and keeping its loss, of looking at its times, and of the exchange of
the slow ranks' times, spread over its window; and of the message that tells all ranks the loss, which is sent
only where a batch may be skipped or the training go back.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from launcher.base.machine import cpu_model
from launcher.runtime.alarms.losses import LossAlarms
from launcher.runtime.alarms.speed import SpeedAlarms
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import job
from tests.helpers.ranks import run_ranks


def timed(work: Callable[[], object], into: list[float]) -> None:
    """Appends how many microseconds a call takes."""
    start = time.perf_counter()
    work()
    into.append((time.perf_counter() - start) * 1e6)


def measure(rank: int, steps: int, cache: str) -> dict[str, list[float]]:
    """Microseconds of each part, step by step."""
    plan = job(
        model={"num_layers": 2},
        batch={"global_size": 4, "micro_size": 2},
        parallel={"pp": 2},
        data={"cache_dir": cache},
        train={"num_steps": steps},
    )
    ctx = make_context(plan.rank(rank), torch.device("cpu"))
    trainer, loader = Trainer(ctx), Loader(ctx)
    losses, speed = LossAlarms(ctx), SpeedAlarms(ctx, lambda event: None, is_first=rank == 1)
    found: dict[str, list[float]] = {"step": [], "loss": [], "times": [], "message": []}
    batches = loader.steps(0)
    ctx.clock.start()
    for step in range(steps):
        batch = next(batches)
        timed(lambda batch=batch, step=step: trainer.step(step, batch), found["step"])  # type: ignore[misc]
        times = ctx.clock.lap()

        def judge(step: int = step) -> None:
            losses.judge(step, 3.0 + step % 7 / 10)
            losses.took(3.0 + step % 7 / 10)

        timed(judge, found["loss"])
        timed(lambda step=step, times=times: speed.after(step, times), found["times"])  # type: ignore[misc]
        timed(lambda: losses.agree(3.0), found["message"])
    loader.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as cache:
        found = run_ranks(2, measure, steps, cache, timeout_s=300)[1]
    print(f"{cpu_model()}, torch {torch.__version__}, {steps} steps, medians of the last stage's rank")
    for name, values in found.items():
        low, middle, high = statistics.quantiles(values[steps // 2 :], n=4)
        print(f"{name:8} {middle:10.1f} us   (quartiles {low:.1f} to {high:.1f})")
    mean = statistics.fmean(found["times"][steps // 2 :])
    print(f"times, mean with the exchange once in a window: {mean:.1f} us")


if __name__ == "__main__":
    main()
