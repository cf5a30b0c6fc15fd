"""``trireme sweep best``: the point of a sweep to go on with."""

from __future__ import annotations

from argparse import Namespace

from launcher.app.sweep.results import best, command, read_outcomes, results
from launcher.app.sweep.store import find_sweep
from launcher.base.errors import LauncherError
from launcher.base.units import counted

_WAYS = ("speed", "loss")


def act(given: Namespace) -> int:
    """Shows the best point and how to run it; returns the exit code.

    Raises:
        LauncherError: when no point has been measured.
    """
    by = given.by or "speed"
    if by not in _WAYS:
        raise LauncherError(f"--by={by}: known are {' and '.join(_WAYS)}.")
    sweep = find_sweep(given.sweep)
    found = read_outcomes(sweep)
    chosen = best(found, by)
    print("\n".join(results([chosen])))
    left = sum(outcome.run is None and outcome.standing != "out of memory as planned" for outcome in found)
    print(f"\n  {command(sweep.recipe, chosen)}")
    if left:
        verb = "is" if left == 1 else "are"
        print(f"\n{left} of {counted(len(found), 'point')} {verb} not measured, and may be better")
    return 0
