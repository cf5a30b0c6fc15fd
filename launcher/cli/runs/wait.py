"""``trireme wait``: follow a run to its end, as ``trireme run`` does, or a sweep to that of its points."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

from launcher.app.ending import finish, progress_of, say, shown
from launcher.app.find_runs import one_run, sweep_at
from launcher.app.sweep.results import DONE, point_standing, read_outcomes
from launcher.app.sweep.store import Sweep, read_sweep
from launcher.app.sweep.summary import print_outcomes
from launcher.base.units import counted
from launcher.cli.arguments import parse
from launcher.contract.job import JobState
from launcher.report.runs import named_base, read_plan
from launcher.runs.handle import standing, standings
from launcher.runs.store import ACTIVE, RunDirectory

HELP = """\
Follows a run to its end: its state, then its steps, then those of its baseline where that is still
on its way, and at last the speedup or the reason of its failure. Ctrl-C ends the waiting and leaves
the run alone. The exit code is 0 when the run succeeded, and 1 when it failed or was cancelled. Of a
sweep it says how many points are in which state, and at last shows its table; a point that ended out
of memory as its plan had warned has not failed where that is to be shown (report.claims=true).
"""
EXAMPLES = """\
  trireme wait runs/quickstart-20250102-030405
  trireme wait runs/quickstart-sweep-20250102-030405
"""
_DRAW_INTERVAL_S = 0.2
_ASK_INTERVAL_S = 2.0


def run(words: list[str]) -> int:
    """Waits for a run; returns the exit code.

    Raises:
        LauncherError: when there is no such run, or its scheduler gives no answer.
    """
    rest = parse("wait", words).names
    if len(rest) == 1 and (sweep := sweep_at(rest[0])):
        return _wait_for_points(read_sweep(sweep))
    directory = one_run(rest, "wait")
    state = _wait(directory)
    if state.phase == "cancelled":
        print(f"cancelled. Run directory: {shown(directory.path)}", file=sys.stderr)
        return 1
    base = named_base(directory.path)
    if state.phase == "succeeded" and base:
        _wait_for_baseline(base)
    return finish(directory, state)


def _wait_for_points(sweep: Sweep) -> int:
    """Waits until every point has ended, and a baseline beside them; returns the exit code."""
    directories, told = [point.directory for point in sweep.points], ""
    plans = [read_plan(directory.path) for directory in directories]
    while True:
        states = standings(directories)
        found = Counter(map(point_standing, plans, directories, states))
        text = ", ".join(f"{count} {stands}" for stands, count in found.items())
        if text != told:
            say(f"{counted(len(directories), 'point')}: {text}")
            told = text
        if not found.keys() & {*ACTIVE}:
            break
        time.sleep(_ASK_INTERVAL_S)
    if found["succeeded"]:
        for base in {base for directory in directories if (base := named_base(directory.path))}:
            _wait_for_baseline(base)
    say("")
    print_outcomes(sweep, read_outcomes(sweep))
    return 0 if found.keys() <= {*DONE} else 1


def _wait_for_baseline(base: Path) -> None:
    if standing(RunDirectory(base)).phase in ACTIVE:
        say(f"succeeded; waits for the baseline {shown(base)}")
        _wait(RunDirectory(base))


def _wait(directory: RunDirectory) -> JobState:
    """The state in which the run ended."""
    plan = read_plan(directory.path)
    progress = progress_of(directory, plan)
    told = ""
    while (state := standing(directory)).phase in ACTIVE:
        text = f"{state.phase}: {state.reason}" if state.reason else state.phase
        if text != told:
            progress.close()
            say(text)
            told = text
        until = time.monotonic() + _ASK_INTERVAL_S
        while time.monotonic() < until:
            if state.phase == "running":
                progress.update()
            time.sleep(_DRAW_INTERVAL_S)
    progress.update()
    progress.close()
    return state
