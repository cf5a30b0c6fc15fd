"""``trireme cancel``: end a run, wherever it is."""

from __future__ import annotations

import os
import signal
import time

from launcher.cli.runs import one_run
from launcher.cli.words import split_flags
from launcher.errors import LauncherError
from launcher.jobs.handle import load_handle, standing
from launcher.jobs.store import ACTIVE, RunDirectory, follower, read_json

HELP = """\
trireme cancel RUN

Ends all ranks of a run and takes it out of the queue. The exit code is 0 when it has ended.

  trireme cancel runs/quickstart-20250102-030405
"""
_TIMEOUT_S = 30
_ASK_INTERVAL_S = 0.5


def run(words: list[str]) -> int:
    """Cancels a run; returns the exit code.

    Raises:
        LauncherError: when there is no such run, or it cannot be ended from here.
    """
    rest, _ = split_flags(words, {})
    directory = one_run(rest, "cancel")
    state = standing(directory)
    if state.phase not in ACTIVE:
        print(f"it has ended already: {state.phase}")
        return 0
    _end(directory)
    deadline = time.monotonic() + _TIMEOUT_S
    while (state := standing(directory)).phase in ACTIVE:
        if time.monotonic() > deadline:
            print(f"still {state.phase} after {_TIMEOUT_S} s; trireme status tells when it has ended")
            return 1
        time.sleep(_ASK_INTERVAL_S)
    print(state.phase)
    return 0


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
