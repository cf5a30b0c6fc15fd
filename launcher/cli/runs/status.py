"""``trireme status``: how runs stand, as a table."""

from __future__ import annotations

import textwrap
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence

from launcher.app.life import life_text
from launcher.app.lookup import DEFAULT_ROOT, all_runs, find_run
from launcher.app.progress import last_step
from launcher.app.sweep.store import stored_sweeps
from launcher.base.columns import columns
from launcher.base.files import read_json
from launcher.base.redaction import escaped
from launcher.base.units import counted, format_duration
from launcher.contract.alarms.events import Event, read_events
from launcher.contract.job import JobState, Phase
from launcher.runs.failure import failure_line
from launcher.runs.state import current_states
from launcher.runs.store import RunDirectory

_NUM_RUNNING, _NUM_OTHERS = 20, 10
_ORDER: tuple[Phase, ...] = ("running", "pending", "failed", "cancelled", "succeeded")
_HEAD = ("run", "state", "job", "step", "since", "")
_REASON_WIDTH = 60
_NUM_EVENTS = 10


def status(given: Namespace) -> int:
    """Shows how runs stand, asking the scheduler once about those that it has: the ones that have not
    ended first, then the newest that have. RUN is a run directory, or its name below runs/; of one alone the
    newest events are shown, too.

    Of one RUN its life is told, too: every start with its steps and why it ended, the time that was trained
    and lost, what is saved, and what comes next. What is to come is an estimate from the latest steps.

    Examples:
      trireme status
      trireme status runs/quickstart-20250102-030405
    """
    root = given.root or DEFAULT_ROOT
    directories = [find_run(word, root) for word in given.names] or all_runs(root)
    sweeps = [] if given.names else [path.name for path in stored_sweeps(root)]
    if not directories and not sweeps:
        print(f"no runs in {root}")
        return 0
    if directories:
        runs = list(zip(directories, current_states(directories), strict=True))
        print("\n".join(table(runs, is_whole=bool(given.names) or given.all)))
        if len(given.names) == 1:
            print("\n".join(["", *life_text(*runs[0])]))
        for line in event_lines(read_events(directories[0].path)) if len(given.names) == 1 else ():
            print(line)
    if sweeps:
        where = f", the newest {sweeps[-1]}" if len(sweeps) > 1 else f", {sweeps[0]}"
        print(f"{counted(len(sweeps), 'sweep')}{where}: trireme sweep status")
    return 0


def table(runs: Sequence[tuple[RunDirectory, JobState]], *, is_whole: bool) -> list[str]:
    """Lines of the table, of which only some are shown unless it is to be whole; then the counts."""
    running, pending = (
        sorted((run for run in runs if run[1].phase == phase), key=lambda run: run[0].path.name)
        for phase in ("running", "pending")
    )
    ended = [run for run in runs if run[1].phase not in ("running", "pending")]
    ended.sort(key=lambda run: run[1].since_s or 0, reverse=True)
    shown = [*running, *pending, *ended]
    if not is_whole:
        shown = [*running[:_NUM_RUNNING], *pending[:_NUM_OTHERS], *ended[:_NUM_OTHERS]]
    lines = columns([_HEAD, *(_cells(*run) for run in shown)], left=len(_HEAD))
    counts = Counter(state.phase for _, state in runs)
    total = ", ".join(f"{counts[phase]} {phase}" for phase in _ORDER if counts[phase])
    if len(runs) > 1:
        hidden = len(runs) - len(shown)
        note = f"; {hidden} not shown, --all shows them" if hidden else ""
        lines += ["", f"{len(runs)} runs: {total}{note}"]
    return lines


def event_lines(events: Sequence[Event]) -> list[str]:
    """The newest events of a run."""
    if not events:
        return []
    newest = events[-_NUM_EVENTS:]
    hidden = len(events) - len(newest)
    head = f"events, the newest {len(newest)} of {len(events)}:" if hidden else "events:"
    return ["", head, *(f"  {escaped(str(event))}" for event in newest)]


def _cells(directory: RunDirectory, state: JobState) -> tuple[str, ...]:
    since = "" if state.since_s is None else format_duration(max(1, round(time.time() - state.since_s)))
    why = state.reason
    if state.phase == "failed":
        why = textwrap.shorten(
            escaped(failure_line(directory.path, state)), _REASON_WIDTH, placeholder=" ..."
        )
    job, *others = str(read_json(directory.handle).get("id", "")).split(",")
    jobs = f"{job} +{len(others)}" if others else job
    return (directory.path.name, state.phase, jobs, last_step(directory), since, why)
