"""``trireme plan``: what a recipe would do, checked and predicted, without starting anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.cli.words import split_words
from launcher.config.compose import Composed, compose
from launcher.config.load import load
from launcher.errors import LauncherError
from launcher.plan.build import build
from launcher.plan.describe import describer, source_roots
from launcher.plan.model import Plan
from launcher.plan.text import plan_text

HELP = """\
trireme plan [RECIPE] [key=value ...] [--json] [--out FILE]

Checks a recipe and shows what it would do: the mesh of ranks, the batch, the layers of every stage,
the drawn schedule, memory and traffic per rank, and the predicted time of a step. Starts nothing.
What cannot run is refused, with the rule and the nearest valid choice.

  --json       the plan as JSON: what the ranks would be given
  --out FILE   write to a file instead of the screen

  trireme plan
  trireme plan quickstart parallel.pp=4
  trireme plan gpt_1t_3072xa100
  trireme plan gpt_1t_3072xa100 --json --out plan.json
"""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A recipe composed and planned."""

    plan: Plan
    composed: Composed


def make_plan(recipe: str, overrides: Sequence[str]) -> Planned:
    """The plan of a recipe under overrides.

    A user's own modules are looked for beside the recipe, then in the current folder.

    Raises:
        LauncherError: when the recipe cannot be composed, is wrong, or cannot run.
    """
    composed = compose(recipe, overrides)
    config = load(composed.values, composed.sources)
    roots = source_roots(config, [str(Path(composed.recipe_path).parent), "."])
    plan = build(config, composed.sources, describe=describer(config.data, roots), source_roots=roots)
    return Planned(plan=plan, composed=composed)


def run(words: list[str]) -> int:
    """Plans and prints."""
    asked = split_words(words, {"json": False, "out": True})
    planned = make_plan(asked.recipe, asked.overrides)
    out = asked.flags["out"]
    is_screen = not out and sys.stdout.isatty()
    text = planned.plan.to_json() if asked.flags["json"] else plan_text(planned.plan, color=is_screen)
    for note in planned.composed.notes:
        print(f"note: {note}", file=sys.stderr)
    if not out:
        print(text, end="")
        return 0
    try:
        Path(str(out)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LauncherError(f"--out {out}: {error.strerror}") from error
    print(f"wrote {out}", file=sys.stderr)
    return 0
