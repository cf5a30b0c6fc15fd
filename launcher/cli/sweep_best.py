"""``trireme sweep best``: the point of a sweep to go on with."""

from __future__ import annotations

from launcher.cli.sweep_status import find_sweep, read_outcomes
from launcher.cli.words import Words
from launcher.errors import LauncherError
from launcher.sweep.results import best, command, results
from launcher.units import counted

_WAYS = ("speed", "loss")


def act(given: Words) -> int:
    """Shows the best point and how to run it; returns the exit code.

    Raises:
        LauncherError: when no point has been measured.
    """
    by = str(given.flags["by"] or "speed")
    if by not in _WAYS:
        raise LauncherError(f"--by={by}: known are {' and '.join(_WAYS)}.")
    sweep = find_sweep(given)
    found = read_outcomes(sweep)
    chosen = best(found, by)
    print("\n".join(results([chosen])))
    left = sum(outcome.run is None and outcome.standing != "out of memory as planned" for outcome in found)
    print(f"\n  {command(sweep.recipe, chosen)}")
    if left:
        verb = "is" if left == 1 else "are"
        print(f"\n{left} of {counted(len(found), 'point')} {verb} not measured, and may be better")
    return 0
