"""Ends runs, wherever they are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from launcher.base.errors import LauncherError
from launcher.report.runs import named_base
from launcher.runs.state import current_states, load_handle
from launcher.runs.store import ACTIVE, RunDirectory, follower, read_json

TIMEOUT_S = 30
"""Longest wait for runs to end: ranks that save first may take more."""
_ASK_INTERVAL_S = 0.5


def going(directories: Sequence[RunDirectory]) -> list[RunDirectory]:
    """The runs that have not ended."""
    found = zip(directories, current_states(directories), strict=True)
    return [run for run, state in found if state.phase in ACTIVE]


def cancel(directories: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Ends all ranks of runs that have not ended, and waits for that; returns those that still run.

    Raises:
        LauncherError: when one cannot be ended from here.
    """
    for directory in directories:
        _end(directory)
    deadline = time.monotonic() + TIMEOUT_S
    while left := going(directories):
        if time.monotonic() > deadline:
            return left
        time.sleep(_ASK_INTERVAL_S)
    return []


def going_baselines(directories: Sequence[RunDirectory]) -> list[RunDirectory]:
    """The baselines, of runs, that have not ended: submitted beside them, they may serve other runs, too."""
    bases = {base for run in directories if (base := named_base(run.path))}
    return going([RunDirectory(base) for base in sorted(bases)])


def _end(directory: RunDirectory) -> None:
    if (job := load_handle(directory)) is not None:
        executor, handle = job
        executor.cancel(handle)
        return
    pid = follower(directory)
    if pid is None:
        host = read_json(directory.status_file).get("hostname", "another machine")
        raise LauncherError(f"the run was started on {host}: cancel it there")
    os.kill(pid, signal.SIGTERM)  # the launcher that follows it ends the ranks
