"""``trireme wait``: follow a run to its end, as ``trireme run`` does."""

from __future__ import annotations

import sys
import time

from launcher.cli.ending import finish, reporting_rank, say, shown
from launcher.cli.progress import Progress
from launcher.cli.runs import one_run
from launcher.cli.words import split_flags
from launcher.jobs.handle import standing
from launcher.jobs.script import JobState
from launcher.jobs.store import ACTIVE, RunDirectory
from launcher.report.runs import named_base, read_plan

HELP = """\
trireme wait RUN

Follows a run to its end: its state, then its steps, then those of its baseline where that is still
on its way, and at last the speedup or the reason of its failure. Ctrl-C ends the waiting and leaves
the run alone. The exit code is 0 when the run succeeded, and 1 when it failed or was cancelled.

  trireme wait runs/quickstart-20250102-030405
"""
_DRAW_INTERVAL_S = 0.2
_ASK_INTERVAL_S = 2.0


def run(words: list[str]) -> int:
    """Waits for a run; returns the exit code.

    Raises:
        LauncherError: when there is no such run, or its scheduler gives no answer.
    """
    rest, _ = split_flags(words, {})
    directory = one_run(rest, "wait")
    state = _wait(directory)
    if state.phase == "cancelled":
        print(f"cancelled. Run directory: {shown(directory.path)}", file=sys.stderr)
        return 1
    base = named_base(directory.path)
    if state.phase == "succeeded" and base and standing(RunDirectory(base)).phase in ACTIVE:
        say(f"the run succeeded; waits for its baseline {shown(base)}")
        _wait(RunDirectory(base))
    return finish(directory, state)


def _wait(directory: RunDirectory) -> JobState:
    """The state in which the run ended."""
    plan = read_plan(directory.path)
    progress = Progress(directory.records(reporting_rank(plan)), plan.config.train.num_steps, sys.stdout)
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
