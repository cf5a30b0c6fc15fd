"""Writes a plan's simulated schedule to a file, in the format of its suffix."""

from __future__ import annotations

from pathlib import Path

from launcher.base.errors import LauncherError
from launcher.base.files import check_new, write_new
from launcher.contract.plan import Plan
from launcher.schedule.drawing.svg import svg_text
from launcher.schedule.drawing.timeline_files import csv_text, trace_text
from launcher.schedule.simulate import paused_gc, planned_timeline

_FORMATS = {".svg": "a picture", ".csv": "a table", ".json": "a trace for ui.perfetto.dev"}


def check_drawing(path: Path) -> None:
    """Refuses a file that could not be written as a drawing, before any planning.

    Raises:
        LauncherError: for an unknown suffix, and for a file that exists.
    """
    if path.suffix not in _FORMATS:
        known = ", ".join(f"{ending} ({what})" for ending, what in _FORMATS.items())
        raise LauncherError(f"--draw {path}: the name must end in one of {known}.")
    check_new(path, "draw")


def draw_plan(plan: Plan, path: Path) -> None:
    """Writes the simulated step of a plan.

    Raises:
        LauncherError: as `check_drawing`, and when the file cannot be written.
    """
    check_drawing(path)
    write_new(path, _drawing(plan, path.suffix), "draw")


@paused_gc()
def _drawing(plan: Plan, ending: str) -> str:
    title, shape = f"{plan.config.name}: {plan.schedule.name}", plan.pipeline
    timeline = planned_timeline(plan)
    if ending == ".svg":
        return svg_text(timeline, shape, title=title)
    return csv_text(timeline) if ending == ".csv" else trace_text(timeline, shape, title=title)
