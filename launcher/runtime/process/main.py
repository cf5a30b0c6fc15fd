"""What torchrun and srun start: `python -m launcher.runtime.process.main RUN/plan.json --sha256 HEX`.

It sends the rank's output to its own log, checks the plan, trains, and writes a record of its failure
where the launcher finds it. torch is imported after the log is open, so that the log also shows a broken
installation.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import socket
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from launcher.base import registry
from launcher.base.errors import ConfigError, JobError, LauncherError
from launcher.base.files import write_whole
from launcher.base.timestamps import steady_time
from launcher.contract.job import OUT_OF_MEMORY, error_name, log_name
from launcher.contract.plan import Plan, sha256
from launcher.runtime.process.environment import process_rank_from_environment
from launcher.runtime.process.heartbeat import HeartbeatWriter
from launcher.runtime.process.log import open_log
from launcher.runtime.process.presence import Presence, joined
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
    parser.add_argument("--sha256", required=True, help="hash of the plan, as in the job")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    arguments = parser.parse_args(argv)
    run_dir = arguments.plan.parent
    process = process_rank_from_environment()
    join = partial(joined, run_dir, process.rank, os.dup(2))
    join()  # before anything is written
    open_log(run_dir / log_name(process.rank))
    try:
        plan = read_plan(arguments.plan, arguments.sha256)
        if process.world_size != plan.world_size:
            raise JobError(f"{process.world_size} ranks were started, the plan is for {plan.world_size}")
    except BaseException as error:
        _fail(run_dir, process.rank, error)

    def run() -> int:
        lease = join()
        try:
            limits = plan.config.run
            presence = Presence(run_dir, process.rank)
            heartbeat = HeartbeatWriter(
                run_dir, process.rank, limits.timeout_s, limits.start_timeout_s, lease
            )
            program = registry.resolve(plan.program)  # imports torch
            program(plan, process, run_dir, heartbeat, resume=arguments.resume)
            presence.close()
        except BaseException as error:
            if lease is not None:  # the report is not written where another one has the run directory now
                lease.check(anew=True)
            _fail(run_dir, process.rank, error)
        return 0

    return supervise(run) if plan.rank(process.rank).role.is_expendable else run()


def _fail(run_dir: Path, rank: int, error: BaseException) -> NoReturn:
    """Writes a report and ends: a rank that failed must not wait for its peers in a destructor."""
    try:
        out_of_memory = is_out_of_memory(error) and not isinstance(error, ConfigError)  # as of a dataset
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # the report itself takes some memory
        with suppress(OSError):
            traceback.print_exc()
        record = {
            "rank": rank,
            "time": steady_time(),
            "error_type": OUT_OF_MEMORY if out_of_memory else type(error).__name__,
            "message": f"{error}\n{_LESS_MEMORY}" if out_of_memory else _message(error),
            "traceback": "" if isinstance(error, LauncherError) or is_full(error) else traceback.format_exc(),
        }
        write_whole(run_dir / error_name(rank), json.dumps(record, indent=1))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _message(error: BaseException) -> str:
    """The error as text; that of a full disk with the host, whose disk it may be."""
    return f"{error} on {socket.gethostname()}" if is_full(error) else str(error)


def is_full(error: BaseException) -> bool:
    """Whether a file could not be written as its disk, or what its owner may use of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def read_plan(path: Path, expected_sha256: str) -> Plan:
    """The plan, checked to be the one that the job was made with.

    Raises:
        JobError: when its hash differs.
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. torch raises a type of its own on CUDA and a text on the CPU. In a
    process with a memory limit, a thread without room for its stack has failed in the same way.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"))
    True
    """
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    limit, most = resource.getrlimit(resource.RLIMIT_DATA)
    has_no_stack = limit != most and str(error) in _NO_THREAD
    return named or has_no_stack or "can't allocate memory" in str(error)


if __name__ == "__main__":
    sys.exit(main())
