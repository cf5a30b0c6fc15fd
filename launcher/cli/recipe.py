"""``trireme recipe``: lists the shipped recipes, shows one composed."""

from __future__ import annotations

import sys

from launcher.cli.words import split_words
from launcher.errors import LauncherError, nearest
from launcher.legible import escaped
from launcher.recipe import listing

HELP = """\
trireme recipe ls
trireme recipe show [RECIPE] [overrides]

  ls    the shipped recipes, one line each
  show  every value of a recipe, with the file and line or the override that it comes from

RECIPE is a shipped name or the path of a YAML file; without it, quickstart.

Examples:
  trireme recipe ls
  trireme recipe show quickstart parallel.tp=2
  trireme recipe show llama3_8b_tp4_dp2_8xh100 model=llama3_70b
"""
_ACTIONS = ("ls", "show")


def run(words: list[str]) -> int:
    """Runs ``recipe ls`` or ``recipe show``.

    Raises:
        LauncherError: for another word, or for a recipe with faults (after it is shown).
    """
    action, *rest = words or [""]
    if action == "ls" and not rest:
        print(*listing.lines(), sep="\n")
        return 0
    if action == "show":
        return _show(rest)
    if action == "ls":
        raise LauncherError(f"recipe ls takes no more words, given {' '.join(rest)!r}.")
    near = nearest(action, _ACTIONS)
    hint = f" Did you mean {near}?" if near else ""
    raise LauncherError(f"{f'recipe {action}'.strip()}: known are ls and show.{hint}")


def _show(words: list[str]) -> int:
    from launcher.config.compose import draft  # Hydra is slow to import, and `ls` needs none of it.
    from launcher.config.load import load
    from launcher.recipe import show

    given = split_words(words, {})
    composed = draft(given.recipe, given.overrides)
    print(escaped(f"# {composed.recipe_path}"))
    for note in composed.notes:
        print(escaped(f"note: {note}"), file=sys.stderr)
    print(*show.lines(composed.values, composed.sources), sep="\n")
    load(composed.values, composed.sources, composed.faults)
    return 0
