"""The chaos suite: strikes runs in many ways, has them go on, and compares what they compute.

    python -m tests.chaos [--only PATTERN] [--where local,slurm] [--seed N] [--times N] [--at-once N]
        [--folder DIR]

Prints a line for each try, and the table. Takes some 20 s for each of about 60 faults. Faults of disks and
mounts need root, those of Slurm its packages.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.chaos.faults import FAULTS, NUM_STEPS, Fault
from tests.chaos.runs import CLUSTER, Suite, Tried, table

_PORT = 14500


def main() -> int:
    """Runs the suite. Returns the exit code: 1 where a fault ended wrong."""
    parser = argparse.ArgumentParser(description="Strikes runs and compares what they compute")
    parser.add_argument("--only", default="", help="a regular expression that the names of the faults match")
    parser.add_argument("--where", default="local,slurm", help="local, slurm or both")
    parser.add_argument(
        "--seed", type=int, default=0, help="moves the steps at which faults strike; 0: as written"
    )
    parser.add_argument("--times", type=int, default=2, help="tries of each fault")
    parser.add_argument("--at-once", type=int, default=2, help="local runs at a time")
    parser.add_argument(
        "--folder", type=Path, help="where the runs are kept; unless given, a new one that is removed"
    )
    arguments = parser.parse_args()
    chosen = [fault for fault in FAULTS if re.search(arguments.only, fault.name)]
    places = arguments.where.split(",")
    dice = random.Random(arguments.seed)
    tries: list[Tried] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        needs_cluster = "slurm" in places and any("slurm" in fault.places for fault in chosen)
        with cluster(folder / "cluster") if needs_cluster else _nothing() as variables:
            suite = Suite(folder=folder, cluster=variables)
            for place in places:
                todo = [fault for fault in chosen if place in fault.places]
                if todo:
                    suite.undisturbed_run(place)
                struck = [
                    (moved(fault, dice) if arguments.seed else fault, place, number)
                    for fault in todo
                    for number in range(arguments.times)
                ]
                # The nodes of a cluster, and the cluster itself, are struck, too.
                with ThreadPoolExecutor(1 if place == "slurm" else arguments.at_once) as pool:
                    for tried in pool.map(lambda words: suite.try_fault(*words), struck):
                        tries.append(tried)
                        print(table([tried]).splitlines()[1], flush=True)
    print(f"\n{table(tries)}")
    wrong = [tried for tried in tries if not tried.is_right]
    print(f"\n{len(tries)} tries, {len(wrong)} ended wrong")
    return 1 if wrong else 0


def moved(fault: Fault, dice: random.Random) -> Fault:
    """The fault at another step, behind the first checkpoint and before the end."""
    step = min(max(0, fault.step + dice.randrange(-5, 6)), NUM_STEPS - 1)
    return replace(fault, step=step) if fault.step else fault


@contextmanager
def cluster(folder: Path) -> Iterator[Mapping[str, str]]:
    """A Slurm in a box; gives the variables that reach it."""
    environment = os.environ | {"CLUSTER_PORT": str(_PORT)}
    subprocess.run([CLUSTER, "start", folder], env=environment, check=True, timeout=120)
    try:
        yield {"SLURM_CONF": f"{folder}/etc/slurm.conf", "CLUSTER": str(folder)}
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=60)


@contextmanager
def _nothing() -> Iterator[Mapping[str, str]]:
    yield {}


if __name__ == "__main__":
    sys.exit(main())
