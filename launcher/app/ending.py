"""How a run that has ended is told: the speedup, or the guilty rank."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from launcher.app.baseline import unfinished_baseline
from launcher.app.progress import Progress
from launcher.base.errors import LauncherError
from launcher.contract.job import RESUME_NOTE, JobState
from launcher.contract.mesh import Coordinates
from launcher.contract.plan import Plan
from launcher.report.tables import speedup_text
from launcher.runs.failure import failure_text
from launcher.runs.store import RunDirectory, saved_steps

_MAX_WIDTH = 100


def finish(directory: RunDirectory, state: JobState) -> int:
    """Says how a run ended; returns the exit code."""
    if state.phase == "cancelled":
        directory.write_state(state)
        print(
            f"stopped by {state.reason}: all ranks have ended. Run directory: {shown(directory.path)}\n"
            f"{saved_text(directory)}",
            file=sys.stderr,
        )
        return state.exit_code or 1
    if state.phase == "failed":
        print(failure_text(directory.path, state), file=sys.stderr)
        return 1
    if problem := unfinished_baseline(directory.path):
        say(f"no speedup: {problem}")
        return 0
    try:
        say("\n" + speedup_text([directory.path], None, width=text_width()).rstrip())
    except LauncherError as error:  # the training succeeded; only its measure is missing
        say(f"no speedup: {error}")
    return 0


def saved_text(directory: RunDirectory) -> str:
    """What a run that has not finished can go on from."""
    if steps := saved_steps(directory.path):
        return f"Saved after step {steps[-1]}: --resume goes on from there."
    plan = Plan.from_json(directory.plan.read_text(encoding="utf-8"))
    if plan.config.train.checkpoint_interval:
        return "Nothing is saved: no checkpoint was complete."
    return "Nothing is saved, as train.checkpoint_interval is 0."


def progress_of(directory: RunDirectory, plan: Plan) -> Progress:
    """The live line of a run, on standard output."""
    records, num_steps = reporting_records(directory, plan), plan.config.train.num_steps
    return Progress(records, num_steps, sys.stdout, resumed=directory.path / RESUME_NOTE)


def reporting_records(directory: RunDirectory, plan: Plan) -> list[Path]:
    """The records that hold the loss and stand for the run: of one rank, or of all where any may be gone."""
    ranks = [plan.mesh.rank(Coordinates(pp=plan.stages[-1].pp_rank, dp=0, tp=0))]
    for role in plan.roles:
        if role.trains and role.is_expendable:
            ranks = list(range(role.first_rank, role.first_rank + role.num_ranks))
    return [directory.records(rank) for rank in ranks]


def say(text: str) -> None:
    """Prints a line at once, whatever the output is."""
    print(text, flush=True)


def shown(path: Path) -> str:
    """A path as short as it can be read from the current folder."""
    here = os.path.relpath(path)
    return str(path) if here.startswith("..") else here


def text_width() -> int:
    """Columns for a table or a drawing."""
    return min(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns, _MAX_WIDTH)
