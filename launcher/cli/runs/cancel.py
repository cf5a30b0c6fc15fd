"""``trireme cancel``: end a run, or all runs of a sweep, wherever they are."""

from __future__ import annotations

import shlex

from launcher.app.cancel import TIMEOUT_S, cancel, going, going_baselines
from launcher.app.lookup import one_run, sweep_at
from launcher.app.output import shown
from launcher.app.sweep.store import read_sweep
from launcher.base.units import counted
from launcher.cli.arguments import parse
from launcher.runs.state import current_state

HELP = """\
Ends all ranks of a run and takes it out of the queue; of a sweep those of every point that has not ended.
On this machine they save first, as on Ctrl-C.
The exit code is 0 when it has ended.
"""
EXAMPLES = """\
  trireme cancel runs/quickstart-20250102-030405
  trireme cancel runs/quickstart-sweep-20250102-030405
"""


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
        points = read_sweep(sweep).points
        directories = [point.directory for point in points if not point.is_waiting]
    runs = going(directories)
    if not runs:
        ended = f"it has ended already: {current_state(directories[0]).phase}" if sweep is None else ""
        print(ended or "none of its points is going")
        return 0
    if left := cancel(runs):
        what = current_state(left[0]).phase if sweep is None else counted(len(left), "point") + " going"
        print(
            f"still {what} after {TIMEOUT_S} s: ranks that save first take their time. trireme status "
            "tells when it has ended; on this machine a second trireme cancel ends them at once"
        )
        return 1
    print(current_state(runs[0]).phase if sweep is None else f"ended {counted(len(runs), 'point')}")
    for base in going_baselines(runs):
        print(f"its baseline goes on: trireme cancel {shlex.quote(shown(base.path))}")
    return 0
