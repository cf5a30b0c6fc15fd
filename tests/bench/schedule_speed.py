"""CPU time to generate, validate and simulate a large schedule.

    python -m tests.bench.schedule_speed [--ranks 64] [--chunks 4] [--microbatches 512] [--repeats 5]

Bar: at the default sizes, 784,384 actions, under 2 s of one core. Times are CPU seconds of this
process, so that other work on the machine is not charged, only its use of shared caches.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from time import process_time

from launcher.contract.actions import PipelineShape
from launcher.schedule.passes import lower
from launcher.schedule.simulate import Costs, simulate
from launcher_plugins.schedules.interleaved_1f1b import Interleaved1F1B

BAR_S = 2.0


def measure(shape: PipelineShape) -> tuple[float, float, int]:
    """Seconds to generate and validate, seconds to simulate, and the number of actions."""
    num_stages = shape.num_stages
    costs = Costs(forward_s=(1.0,) * num_stages, backward_s=(2.0,) * num_stages, transfer_s=0.1)
    start = process_time()
    lists = lower(Interleaved1F1B(), shape)
    lowered = process_time()
    simulate(lists, shape, costs)
    return lowered - start, process_time() - lowered, sum(map(len, lists))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("ranks", 64), ("chunks", 4), ("microbatches", 512), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    shape = PipelineShape(
        num_pp_ranks=given.ranks, num_chunks=given.chunks, num_microbatches=given.microbatches
    )
    measure(PipelineShape(num_pp_ranks=2, num_chunks=2, num_microbatches=4))  # imports, first calls
    runs = [measure(shape) for _ in range(given.repeats)]
    totals = [lowered_s + simulated_s for lowered_s, simulated_s, _ in runs]
    print(f"interleaved_1f1b p={given.ranks} v={given.chunks} m={given.microbatches}: {runs[0][2]:,} actions")
    print(f"generated and validated  {statistics.median(run[0] for run in runs):.2f} s")
    print(f"simulated                {statistics.median(run[1] for run in runs):.2f} s")
    print(
        f"all                      {statistics.median(totals):.2f} s "
        f"(median of {len(runs)}; {min(totals):.2f} to {max(totals):.2f}; bar {BAR_S:.0f} s)"
    )
    print(
        f"Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
