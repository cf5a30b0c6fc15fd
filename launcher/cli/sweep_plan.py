"""``trireme sweep plan``: every point of a sweep, predicted or refused; nothing is started."""

from __future__ import annotations

import sys

from launcher.cli.ending import text_width
from launcher.cli.main import EXIT_FAULT
from launcher.cli.sweep_points import Points, plan_points, submit_faults
from launcher.cli.words import Words
from launcher.sweep.tables import predictions, refusals
from launcher.units import counted


def act(given: Words) -> int:
    """Plans and shows the points; returns the exit code.

    Raises:
        LauncherError: when the words make no sweep.
    """
    points = plan_points(given, submit_faults)
    for note in points.notes:
        print(f"note: {note}", file=sys.stderr)
    print("\n".join(lines(points)))
    return 0 if points.planned else EXIT_FAULT


def lines(points: Points) -> list[str]:
    """The number of points, the table of those that can run, and the refused ones."""
    count = len(points.planned) + len(points.refused)
    found = [f"{points.recipe}: {counted(count, 'point')} = {points.dims}"]
    if points.planned:
        found += ["", f"{len(points.planned)} can run (predicted; memory is that of the fullest rank)"]
        found += predictions([(item.point.label, item.plan) for item in points.planned])
    if points.refused:
        found += ["", *refusals(points.refused, text_width())]
    return found
