"""``trireme sweep best``: the point of a sweep to go on with."""

from __future__ import annotations

from launcher.cli.sweep_status import find_sweep, read_outcomes
from launcher.cli.words import Words
from launcher.errors import LauncherError
from launcher.sweep.results import best, command, results

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
    others = sum(outcome.run is not None for outcome in found) - 1
    print(f"\n  {command(sweep.recipe, chosen)}")
    if others < len(found) - 1:
        print(f"\n{len(found) - others - 1} of {len(found)} points are not measured; one may be better")
    return 0
