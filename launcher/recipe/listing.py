"""The shipped recipes, one line each."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.config.recipes import description, shipped


def lines() -> Iterator[str]:
    """Name and description of every shipped recipe, aligned."""
    recipes = shipped()
    width = max(map(len, recipes), default=0)
    for name, path in recipes.items():
        yield f"{name:{width}}  {description(path)}".rstrip()
