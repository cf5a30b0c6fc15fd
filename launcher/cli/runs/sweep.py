"""``trireme sweep``: many runs of one recipe, each with values of its own, and their table."""

from __future__ import annotations

import sys
from argparse import Namespace

from launcher.app.output import TERMINAL, shown
from launcher.app.sweep import tables
from launcher.app.sweep.store import find_sweep
from launcher.app.sweep.summary import say_results
from launcher.base.errors import LauncherError
from launcher.base.units import counted
from launcher.cli.arguments import request

_OF_RECIPES = ("plan", "run")
"""The actions that are about a recipe and not about a sweep that is there."""
_WAYS = ("speed", "loss")


def sweep(given: Namespace) -> int:
    """Runs a recipe with every combination of some values: key=A,B,C or key=range(FROM,TO,STEP), as many such
    words as there are settings to vary. A group of files is varied like a setting: model=tiny,gpt2_124m.
    A recipe may hold the values itself (sweep: {key: "A,B"}).

      plan    every point with its predicted speed, memory and bubble, and the refused ones with their reasons
      run     runs the points: here one after the other, or on Slurm with site= or executor=slurm, as one job
              array where all ask for the same resources, else as a job each. One that fails ends no other.
      status  how the points stand, and what was measured, beside what was predicted
      retry   runs those again that failed or did not start, and a baseline that failed; each point resumes
              from its last checkpoint
      best    the fastest point, and the command that runs it

    SWEEP is the sweep's directory, its name below runs/, or a recipe for its newest sweep; without it the
    newest of all. Each point has a directory of its own in it.

    The exit code is 0 when every point that can run succeeded (or was submitted), 1 when one failed, 2 when
    there is none that can run, and 130 after Ctrl-C.

    Examples:
      trireme sweep plan quickstart parallel.pp=1,2,4 parallel.schedule=gpipe,1f1b
      trireme sweep run quickstart parallel.pp=1,2 train.num_steps=30
      trireme sweep run quickstart site=box cluster.nodes=1,2 cluster.devices_per_node=2 parallel.dp=auto \\
          cluster.allow_idle_devices=false
      trireme sweep status
    """
    if given.action not in _OF_RECIPES and len(given.names) > 1:
        raise LauncherError(f"sweep {given.action} takes one sweep, given {' '.join(given.names)}.")
    given.sweep = given.names[0] if given.names else ""
    actions = {"plan": _plan, "run": _run, "status": _status, "retry": _retry, "best": _best}
    return actions[given.action](given)


def _plan(given: Namespace) -> int:
    from launcher.app.sweep.planning import plan_sweep  # imports hydra, which the other actions do not need
    from launcher.app.sweep.run import NONE_CAN_RUN

    planned = plan_sweep(request(given))
    for note in planned.notes:
        print(f"note: {note}", file=sys.stderr)
    print("\n".join(tables.planned_lines(planned)))
    return 0 if planned.points else NONE_CAN_RUN


def _run(given: Namespace) -> int:
    from launcher.app.sweep.run import run_sweep

    return run_sweep(request(given)).exit_code


def _status(given: Namespace) -> int:
    sweep = find_sweep(given.sweep)
    print(f"{shown(sweep.path)}: {counted(len(sweep.points), 'point')} of {sweep.recipe}\n")
    say_results(sweep, TERMINAL)
    return 0


def _retry(given: Namespace) -> int:
    from launcher.app.sweep.run import retry_sweep

    return retry_sweep(find_sweep(given.sweep), request(given)).exit_code


def _best(given: Namespace) -> int:
    by = given.by or "speed"
    if by not in _WAYS:
        raise LauncherError(f"--by={by}: known are {' and '.join(_WAYS)}.")
    sweep = find_sweep(given.sweep)
    points = tables.with_results(sweep)
    chosen = tables.best_point(points, by)
    print("\n".join(tables.results_table([chosen], by=by)))
    print(f"\n  {tables.rerun_command(sweep.recipe, chosen)}")
    left = sum(point.measured is None and point.state_text != "out of memory as planned" for point in points)
    if left:
        verb = "is" if left == 1 else "are"
        print(f"\n{left} of {counted(len(points), 'point')} {verb} not measured, and may be better")
    return 0
