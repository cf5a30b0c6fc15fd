"""``trireme cancel``: end a run, or all runs of a sweep, wherever they are."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Sequence

from launcher.app.ending import shown
from launcher.app.find_runs import one_run, sweep_at
from launcher.app.sweep.results import is_waiting
from launcher.app.sweep.store import read_sweep
from launcher.base.errors import LauncherError
from launcher.base.units import counted
from launcher.cli.arguments import parse
from launcher.report.runs import named_base
from launcher.runs.handle import load_handle, standing, standings
from launcher.runs.store import ACTIVE, RunDirectory, follower, read_json

HELP = """\
Ends all ranks of a run and takes it out of the queue; of a sweep those of every point that has not ended.
On this machine they save first, as on Ctrl-C.
The exit code is 0 when it has ended.
"""
EXAMPLES = """\
  trireme cancel runs/quickstart-20250102-030405
  trireme cancel runs/quickstart-sweep-20250102-030405
"""
_TIMEOUT_S = 30
_ASK_INTERVAL_S = 0.5


def run(words: list[str]) -> int:
    """Cancels a run or the points of a sweep; returns the exit code.

    Raises:
        LauncherError: when there is no such run, or it cannot be ended from here.
    """
    rest = parse("cancel", words).names
    sweep = sweep_at(rest[0]) if len(rest) == 1 else None
    if sweep is None:
        directories = [one_run(rest, "cancel")]
    else:
        points = [point.directory for point in read_sweep(sweep).points]
        directories = [directory for directory in points if not is_waiting(directory)]
    going = _going(directories)
    if not going:
        ended = f"it has ended already: {standing(directories[0]).phase}" if sweep is None else ""
        print(ended or "none of its points is going")
        return 0
    for directory in going:
        _end(directory)
    deadline = time.monotonic() + _TIMEOUT_S
    while left := _going(going):
        if time.monotonic() > deadline:
            what = standing(left[0]).phase if sweep is None else counted(len(left), "point") + " going"
            print(
                f"still {what} after {_TIMEOUT_S} s: ranks that save first take their time. trireme status "
                "tells when it has ended; on this machine a second trireme cancel ends them at once"
            )
            return 1
        time.sleep(_ASK_INTERVAL_S)
    print(standing(going[0]).phase if sweep is None else f"ended {counted(len(going), 'point')}")
    _tell_of_baselines(going)
    return 0


def _going(directories: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Those that have not ended."""
    found = zip(directories, standings(directories), strict=True)
    return [run for run, state in found if state.phase in ACTIVE]


def _tell_of_baselines(ended: Sequence[RunDirectory]) -> None:
    """Names those that were submitted beside the runs, and go on: other runs may need them."""
    bases = {base for run in ended if (base := named_base(run.path))}
    for run in _going([RunDirectory(base) for base in sorted(bases)]):
        print(f"its baseline goes on: trireme cancel {shlex.quote(shown(run.path))}")


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
