"""``trireme sweep status``: how the points of a sweep stand, and what they measured."""

from __future__ import annotations

from argparse import Namespace

from launcher.app.ending import shown
from launcher.app.sweep.results import read_outcomes
from launcher.app.sweep.store import find_sweep
from launcher.app.sweep.summary import print_outcomes
from launcher.base.units import counted


def act(given: Namespace) -> int:
    """Shows a sweep; returns the exit code.

    Raises:
        LauncherError: when it is not there, or a scheduler gives no answer.
    """
    sweep = find_sweep(given.sweep)
    print(f"{shown(sweep.path)}: {counted(len(sweep.points), 'point')} of {sweep.recipe}\n")
    print_outcomes(sweep, read_outcomes(sweep))
    return 0
