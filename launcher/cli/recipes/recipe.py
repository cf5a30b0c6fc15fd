"""``trireme recipe``: lists the shipped recipes, shows one composed."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.base.errors import LauncherError
from launcher.cli.arguments import parse
from launcher.config.recipes import description, shipped

HELP = """\
  ls    the shipped recipes, one line each
  show  every value of a recipe, with the file and line or the override that it comes from

RECIPE is a shipped name or the path of a YAML file; without it, quickstart.
"""
EXAMPLES = """\
  trireme recipe ls
  trireme recipe show quickstart parallel.tp=2
  trireme recipe show llama3_8b_tp4_dp2_8xh100 model=llama3_70b
"""


def run(words: list[str]) -> int:
    """Runs ``recipe ls`` or ``recipe show``.

    Raises:
        LauncherError: for another word, or for a recipe with faults (after it is shown).
    """
    given = parse("recipe", words)
    if given.action == "show":
        from launcher.cli.recipes.show import show  # Hydra is slow to import, and `ls` needs none of it

        return show(given.recipe, given.overrides)
    if given.names:
        raise LauncherError(f"recipe ls takes no more words, given {' '.join(given.names)!r}.")
    print(*_shipped_lines(), sep="\n")
    return 0


def _shipped_lines() -> Iterator[str]:
    """Name and description of every shipped recipe, aligned."""
    recipes = shipped()
    width = max(map(len, recipes), default=0)
    for name, path in recipes.items():
        yield f"{name:{width}}  {description(path)}".rstrip()
