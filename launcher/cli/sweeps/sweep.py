"""``trireme sweep``: many runs of one recipe, each with values of its own, and their table."""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Protocol, cast

from launcher.base.errors import LauncherError
from launcher.cli.arguments import parse

HELP = """\
Runs a recipe with every combination of some values: key=A,B,C or key=range(FROM,TO,STEP), as many such
words as there are settings to vary. A group of files is varied like a setting: model=tiny,gpt2_124m.
A recipe may hold the values itself (sweep: {key: "A,B"}).

  plan    every point with its predicted speed, memory and bubble, and the refused ones with their reasons
  run     runs the points: here one after the other, or on Slurm with site= or executor=slurm, as one job
          array where all ask for the same resources, else as a job each. One that fails ends no other.
  status  how the points stand, and what was measured, beside what was predicted
  retry   runs those again that failed or did not start; what was saved is gone on from
  best    the fastest point, and the command that runs it

SWEEP is the sweep's directory, its name below runs/, or a recipe for its newest sweep; without it the
newest of all. Each point has a directory of its own in it.

The exit code is 0 when every point that can run succeeded (or was submitted), 1 when one failed, 2 when
there is none that can run, and 130 after Ctrl-C.
"""
EXAMPLES = """\
  trireme sweep plan quickstart parallel.pp=1,2,4 parallel.schedule=gpipe,1f1b
  trireme sweep run quickstart parallel.pp=1,2 train.num_steps=30
  trireme sweep run quickstart site=box cluster.nodes=1,2 cluster.devices_per_node=2 parallel.dp=auto \\
      cluster.allow_idle_devices=false
  trireme sweep status
"""


_OF_RECIPES = ("plan", "run")
"""Those that are about a recipe and not about a sweep that is there."""


class Action(Protocol):
    """What a module of an action holds."""

    def act(self, given: Namespace) -> int:
        """Does it; returns the exit code."""
        ...


def run(words: list[str]) -> int:
    """Runs an action; returns the exit code.

    Raises:
        LauncherError: for another word, or when there is nothing that can run.
    """
    given = parse("sweep", words)
    if given.action not in _OF_RECIPES and len(given.names) > 1:
        raise LauncherError(f"sweep {given.action} takes one sweep, given {' '.join(given.names)}.")
    given.sweep = given.names[0] if given.names else ""
    module = cast(Action, importlib.import_module(f"launcher.cli.sweeps.{given.action}"))
    return module.act(given)
