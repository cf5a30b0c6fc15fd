"""``trireme wait`` and ``trireme cancel``: follow a run or a sweep to its end, or end it."""

from __future__ import annotations

import shlex
from argparse import Namespace

from launcher.app.lookup import one_run, sweep_at
from launcher.app.output import shown
from launcher.app.sweep.point import DONE
from launcher.app.sweep.store import read_sweep
from launcher.app.sweep.summary import wait_for_points
from launcher.app.wait import END_TIMEOUT_S, end_runs, going, going_baselines, wait_for_run
from launcher.base.units import counted
from launcher.runs.state import current_state


def wait(given: Namespace) -> int:
    """Follows a run to its end: its state, then its steps, then those of its baseline where that has
    not ended, and at last the speedup or the reason of its failure. Ctrl-C ends the waiting and leaves
    the run alone. The exit code is 0 when the run succeeded, and 1 when it failed or was cancelled. Of a
    sweep it says how many points are in which state, and at last shows its table; a point that ended out
    of memory as its plan had warned has not failed where that is to be shown (report.claims=true).

    Examples:
      trireme wait runs/quickstart-20250102-030405
      trireme wait runs/quickstart-sweep-20250102-030405
    """
    rest = given.names
    if len(rest) == 1 and (sweep := sweep_at(rest[0])):
        return int(any(point.state_text not in DONE for point in wait_for_points(read_sweep(sweep))))
    return int(wait_for_run(one_run(rest, "wait")).state.phase != "succeeded")


def cancel(given: Namespace) -> int:
    """Ends all ranks of a run and takes it out of the queue; of a sweep those of every point that has not
    ended. On this machine they save first, as on Ctrl-C.
    The exit code is 0 when it has ended.

    Examples:
      trireme cancel runs/quickstart-20250102-030405
      trireme cancel runs/quickstart-sweep-20250102-030405
    """
    rest = given.names
    sweep = sweep_at(rest[0]) if len(rest) == 1 else None
    if sweep is None:
        directories = [one_run(rest, "cancel")]
    else:
        points = read_sweep(sweep).points
        directories = [point.directory for point in points if not point.is_waiting]
    runs = going(directories)
    if not runs:
        ended = f"it has ended already: {current_state(directories[0]).phase}" if sweep is None else ""
        print(ended or "none of its points is going")
        return 0
    if left := end_runs(runs):
        what = current_state(left[0]).phase if sweep is None else counted(len(left), "point") + " going"
        print(
            f"still {what} after {END_TIMEOUT_S} s: ranks that save first take their time. trireme status "
            "tells when it has ended; on this machine a second trireme cancel ends them at once"
        )
        return 1
    print(current_state(runs[0]).phase if sweep is None else f"ended {counted(len(runs), 'point')}")
    for base in going_baselines(runs):
        print(f"its baseline goes on: trireme cancel {shlex.quote(shown(base.path))}")
    return 0
