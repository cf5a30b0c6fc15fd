"""``trireme wait``: follow a run to its end, as ``trireme run`` does, or a sweep to that of its points."""

from __future__ import annotations

from launcher.app.lookup import one_run, sweep_at
from launcher.app.sweep.point import DONE
from launcher.app.sweep.store import read_sweep
from launcher.app.sweep.summary import wait_for_points
from launcher.app.wait import wait_for_run
from launcher.cli.arguments import parse

HELP = """\
Follows a run to its end: its state, then its steps, then those of its baseline where that has
not ended, and at last the speedup or the reason of its failure. Ctrl-C ends the waiting and leaves
the run alone. The exit code is 0 when the run succeeded, and 1 when it failed or was cancelled. Of a
sweep it says how many points are in which state, and at last shows its table; a point that ended out
of memory as its plan had warned has not failed where that is to be shown (report.claims=true).
"""
EXAMPLES = """\
  trireme wait runs/quickstart-20250102-030405
  trireme wait runs/quickstart-sweep-20250102-030405
"""


def run(words: list[str]) -> int:
    """Waits for a run; returns the exit code.

    Raises:
        LauncherError: when there is no such run, or its scheduler gives no answer.
    """
    rest = parse("wait", words).names
    if len(rest) == 1 and (sweep := sweep_at(rest[0])):
        return int(any(point.state_text not in DONE for point in wait_for_points(read_sweep(sweep))))
    return int(wait_for_run(one_run(rest, "wait")).state.phase != "succeeded")
