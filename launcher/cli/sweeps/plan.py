"""``trireme sweep plan``: every point of a sweep, predicted or refused; nothing is started."""

from __future__ import annotations

import sys
from argparse import Namespace

from launcher.app.ending import text_width
from launcher.app.sweep.points import Points, plan_points
from launcher.app.sweep.tables import predictions, refusals
from launcher.base.units import counted
from launcher.cli.arguments import request
from launcher.cli.main import EXIT_FAULT


def act(given: Namespace) -> int:
    """Plans and shows the points; returns the exit code.

    Raises:
        LauncherError: when the words make no sweep.
    """
    points = plan_points(request(given), starts=False)
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
