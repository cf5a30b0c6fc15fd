"""A run of many tiny steps on a Slurm in a box, struck nine times, beside an undisturbed one.

    python -m tests.chaos.month [--steps 20000] [--folder DIR]

Five requeues, two node crashes, one full disk, after which an operator resumes, and one bad node, which the
check of nodes finds. Prints what happened, the memory of ranks and of the launcher that waits, whether losses
and weights are equal bitwise, and the time of the report. Needs root, for the small disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.chaos.__main__ import cluster
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.runs import Found, Run, Suite, found
from tests.helpers.waiting import wait_until

EVENTS = (
    *("requeue", "node crash", "requeue", "full disk", "requeue"),
    *("node crash", "requeue", "bad node", "requeue"),
)
DISK = "size=160m"
LIMIT_S = 3600.0
_BAD_NODE = next(fault for fault in FAULTS if fault.name == "bad node")
_PLAIN = Fault(name="month", moment="never", overrides=_BAD_NODE.overrides)
_MIB = 2**20


@dataclass(kw_only=True)
class Memory:
    """Resident memory of processes, looked at every half second."""

    run: Run
    ranks: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    launcher: list[float] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Looks until it is over."""
        while not self.is_over.wait(0.5):
            for pid in self.run.ranks():
                self.ranks[pid] += _resident(pid)
            self.launcher += [size for process in self.run.processes[-1:] for size in _resident(process.pid)]

    def text(self) -> str:
        """Of the rank that lived longest and of the launcher, after a quarter of the time and at the end."""
        longest = max(self.ranks.values(), key=len)
        words = []
        for name, sizes in (("a rank", longest), ("launcher", self.launcher)):
            words.append(f"{name} {sizes[len(sizes) // 4]:.1f} MiB, at its end {sizes[-1]:.1f} MiB")
        return "; ".join(words)


def _resident(pid: int) -> list[float]:
    try:
        return [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / _MIB]
    except (OSError, IndexError):
        return []


def newest_step(run: Run) -> int:
    """The newest step of rank 1 that is recorded."""
    try:
        with (run.folder / "metrics" / "rank-00001.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            lines = [line for line in file.read().splitlines() if b'"step":' in line and line.endswith(b"}")]
        return int(json.loads(lines[-1]).get("step", 0)) if lines else 0
    except (OSError, ValueError):
        return 0


def strike(run: Run, event: str, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Does it to the run, and what its operator does then; the process that ends with the run."""
    run.forget_node()
    before = run.num_starts()
    if event == "full disk":
        run.shell("cat /dev/zero >$RUN/ballast 2>/dev/null || true")
        run.wait(process, may_fail=True)
        run.shell("rm $RUN/ballast")
        return run.start("--resume")
    strikes = {
        "requeue": "scontrol requeue $JOB",
        "node crash": '"$SLURM_CLUSTER" crash $NODE "$CLUSTER"',
        "bad node": _BAD_NODE.outside,
    }
    run.shell(strikes[event])
    wait_until(lambda: run.num_starts() > before, timeout_s=LIMIT_S)
    if event == "node crash":
        run.shell('"$SLURM_CLUSTER" revive $NODE "$CLUSTER"')
    return process


def _is_due(run: Run, step: int, process: subprocess.Popen[bytes]) -> bool:
    return newest_step(run) >= step or process.poll() is not None


def month(suite: Suite, folder: Path) -> tuple[Run, Memory]:
    """The run that is struck, to its end."""
    run = Run(suite=suite, place="slurm", folder=folder, fault=_PLAIN)
    process, memory = run.start(), Memory(run=run)
    watching = threading.Thread(target=memory.watch, daemon=True)
    watching.start()
    began = time.monotonic()
    for number, event in enumerate(EVENTS, 1):
        due, ended = number * suite.num_steps // (len(EVENTS) + 1), process
        wait_until(partial(_is_due, run, due, ended), timeout_s=LIMIT_S)
        assert ended.poll() is None, f"the run ended ahead of event {number}: {run.said()[-500:]}"
        step = newest_step(run)
        process = strike(run, event, process)
        print(f"{time.monotonic() - began:6.0f} s  step {step:6}  {event}", flush=True)
    run.wait(process)
    print(f"{time.monotonic() - began:6.0f} s  step {suite.num_steps:6}  finished", flush=True)
    memory.is_over.set()
    watching.join()
    return run, memory


def undisturbed(suite: Suite) -> Found:
    """The same on this machine, struck by nothing."""
    run = Run(suite=suite, place="local", folder=suite.folder / "undisturbed", fault=None)
    run.wait(run.start())
    return found(run.folder, suite.num_steps, is_whole=False)


def main() -> int:
    """Runs it. Returns the exit code: 1 where the run is not equal to an undisturbed one."""
    parser = argparse.ArgumentParser(description="A month of faults in minutes")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument(
        "--folder", type=Path, help="where runs are kept; a new one that is removed unless given"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        disk = folder / "disk"
        disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", disk], check=True)  # before nodes start
        try:
            with cluster(folder / "cluster") as variables:
                steps = arguments.steps
                suite = Suite(
                    folder=folder,
                    cluster=variables,
                    num_steps=steps,
                    interval=max(1, steps // 100),
                    window_steps=max(10, steps // 20),
                    limit_s=LIMIT_S,
                )
                run, memory = month(suite, disk / "run")
                return tell(suite, run, memory)
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)


def tell(suite: Suite, run: Run, memory: Memory) -> int:
    """Prints what came of it; the exit code."""
    struck, whole = found(run.folder, suite.num_steps, is_whole=False), undisturbed(suite)
    common = {step for step, _ in struck.losses} & {step for step, _ in whole.losses}
    ours, theirs = ({pair for pair in each.losses if pair[0] in common} for each in (struck, whole))
    is_equal = ours == theirs and struck.shards == whole.shards
    begin = time.monotonic()
    report = [sys.executable, "-m", "launcher", "report", str(run.folder)]
    subprocess.run(report, env=suite.environment, check=True, stdout=subprocess.DEVNULL)
    print(f"losses of {len(common)} steps and the weights equal bitwise: {is_equal}")
    print(f"memory: {memory.text()}")
    size = sum(path.stat().st_size for path in (run.folder / "metrics").rglob("*") if path.is_file())
    took = time.monotonic() - begin
    print(f"report in {took:.1f} s, of {size / _MIB:.1f} MiB of metrics; {run.num_starts()} starts")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
