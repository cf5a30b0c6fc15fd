"""``trireme recipe``: lists the shipped recipes, or shows one composed, with the origin of each value."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.base.errors import LauncherError
from launcher.base.redaction import escaped, hide_secrets, without_secrets
from launcher.config.recipes import description, shipped
from launcher.config.save import scalar_text
from launcher.typed.read import Source, join

_MAX_WIDTH = 56


def recipe(given: Namespace) -> int:
    """Lists the recipes, or shows one composed.

      ls    the shipped recipes, one line each
      show  every value of a recipe, with the file and line or the override that it comes from

    RECIPE is a shipped name or the path of a YAML file; without it, quickstart.

    Examples:
      trireme recipe ls
      trireme recipe show quickstart parallel.tp=2
      trireme recipe show llama3_8b_tp4_dp2_8xh100 model=llama3_70b
    """
    if given.action == "show":
        return _show(given.recipe, given.overrides)
    if given.names:
        raise LauncherError(f"recipe ls takes no more words, given {' '.join(given.names)!r}.")
    recipes = shipped()
    width = max(map(len, recipes), default=0)
    for name, path in recipes.items():
        print(f"{name:{width}}  {description(path)}".rstrip())
    return 0


def _show(recipe: str, overrides: Sequence[str]) -> int:
    """Shows a recipe under overrides, then refuses one with faults."""
    from launcher.config.compose import compose  # Hydra is slow to import, and `ls` needs none of it
    from launcher.config.load import as_read, load

    composed = compose(recipe, overrides)
    print(escaped(f"# {composed.recipe_path}"))
    for note in composed.notes:
        print(escaped(f"note: {note}"), file=sys.stderr)
    print(*lines(as_read(composed.values, composed.sources), composed.sources), sep="\n")
    load(composed.values, composed.sources, composed.faults)
    return 0


def lines(values: Mapping[str, Any], sources: Mapping[str, Source]) -> Iterator[str]:
    """Each setting with its value, beside the file and line or the override that it is from.

    The value of a setting that names a secret is not shown.

    >>> list(lines({"seed": 0}, {"seed": Source(where="conf/base.yaml:16", text="0")}))
    ['seed: 0  # conf/base.yaml:16']
    """
    rows = list(_rows(values, sources, ""))
    width = min(max((len(text) for text, _ in rows), default=0), _MAX_WIDTH)
    for text, where in rows:
        yield f"{text:{width}}  # {where}" if where else text


def _rows(values: Mapping[str, Any], sources: Mapping[str, Source], path: str) -> Iterator[tuple[str, str]]:
    indent = "  " * path.count(".") + "  " * bool(path)
    for key, value in values.items():
        inner = join(path, key)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:", ""
            yield from _rows(value, sources, inner)
        else:
            where = sources[inner].where if inner in sources else ""
            text = f"{indent}{key}: {scalar_text(without_secrets(value, inner))}"
            yield escaped(text), escaped(hide_secrets(where))
