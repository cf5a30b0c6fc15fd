"""What torchrun and srun start: `python -m launcher.runtime.process.main RUN/plan.json --sha256 HEX`.

It sends the rank's output to its own log, checks the plan, trains, and leaves a record of its failure
where the launcher finds it. torch is imported after the log is open, so that a broken installation
is told there too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from launcher.base import registry
from launcher.base.errors import JobError, LauncherError
from launcher.base.files import write_whole
from launcher.contract.job import OUT_OF_MEMORY
from launcher.contract.plan import Plan, sha256
from launcher.runtime.process.heartbeat import Heart
from launcher.runtime.process.process_rank import Place, place_from_environment
from launcher.runtime.process.supervise import supervise

_LESS_MEMORY = (
    "A smaller batch.micro_size, parallel.recompute=full, parallel.schedule=1f1b in place of gpipe, or more "
    "tp or pp takes less; `trireme plan` shows how much."
)
_NO_THREAD = ("can't start new thread", "unable to start watchdog thread")


def main(argv: list[str] | None = None) -> int:
    """Runs one rank. Returns its exit code."""
    parser = argparse.ArgumentParser(description="One rank of a planned run")
    parser.add_argument("plan", type=Path, help="plan.json in its run directory")
    parser.add_argument("--sha256", required=True, help="hash of the plan, as the job carries it")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    arguments = parser.parse_args(argv)
    run_dir = arguments.plan.parent
    place = place_from_environment()
    _open_log(run_dir / "logs" / f"rank-{place.rank}.log")
    try:
        plan = read_plan(arguments.plan, arguments.sha256)
        _check_place(plan, place)
    except BaseException as error:
        _fail(run_dir, place, error)

    def run() -> int:
        try:
            heart = Heart(run_dir, place.rank, plan.config.run.timeout_s, plan.config.run.start_timeout_s)
            program = registry.resolve(plan.program)  # imports torch
            program(plan, place, run_dir, heart, resume=arguments.resume)
        except BaseException as error:
            _fail(run_dir, place, error)
        return 0

    return supervise(run) if plan.rank(place.rank).role.is_expendable else run()


def _fail(run_dir: Path, place: Place, error: BaseException) -> NoReturn:
    """Leaves a report and ends: a rank that failed must not wait for its peers in a destructor."""
    try:
        out_of_memory = is_out_of_memory(error)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # telling of a full memory takes some
        traceback.print_exc()
        report = run_dir / "exit" / f"rank-{place.rank}.json"
        _leave_failure(report, place.rank, error, out_of_memory=out_of_memory)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)


def read_plan(path: Path, expected_sha256: str) -> Plan:
    """The plan, when it is the one the job was made with.

    Raises:
        JobError: when its hash is another one.
        PluginError: when a plugin here is not the recorded one.
    """
    text = path.read_text(encoding="utf-8")
    found = sha256(text)
    if found != expected_sha256:
        raise JobError(f"{path} has SHA-256 {found}, the job was made with {expected_sha256}: it was changed")
    plan = Plan.from_json(text)
    for plugin in plan.plugins:
        registry.verify(plugin)
    return plan


def _check_place(plan: Plan, place: Place) -> None:
    if place.world_size != plan.world_size:
        raise JobError(f"{place.world_size} ranks were started, the plan is for {plan.world_size}")


def _open_log(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch says so by a type on CUDA and by a text on the CPU. So does, in a
    process that is held to a part of the memory, a thread without room for its stack.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"))
    True
    """
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    held_to, most = resource.getrlimit(resource.RLIMIT_DATA)
    has_no_stack = held_to != most and str(error) in _NO_THREAD
    return named or has_no_stack or "can't allocate memory" in str(error)


def _leave_failure(path: Path, rank: int, error: BaseException, *, out_of_memory: bool) -> None:
    known = isinstance(error, LauncherError)
    record = {
        "rank": rank,
        "time": time.time(),
        "error_type": OUT_OF_MEMORY if out_of_memory else type(error).__name__,
        "message": f"{error}\n{_LESS_MEMORY}" if out_of_memory else str(error),
        "traceback": "" if known else traceback.format_exc(),
    }
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(record, indent=1))


if __name__ == "__main__":
    sys.exit(main())
