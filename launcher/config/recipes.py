"""Finds recipes, and reads their descriptions without a YAML library."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from launcher.base import resources
from launcher.base.errors import LauncherError, did_you_mean
from launcher.base.files import safe_name
from launcher.base.redaction import shortened

SUFFIX = ".yaml"
_SUFFIXES = (SUFFIX, ".yml")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The file of one recipe."""

    path: Path
    note: str = ""
    """Which file of the same name is not used; empty: there is none."""

    @property
    def foreign_folders(self) -> tuple[Path, ...]:
        """The folders that it came in, links resolved: of the file, and of the link to it. None where it
        ships with the launcher or is in the reader's own folder."""
        found = dict.fromkeys((self.path.parent.resolve(), self.path.resolve().parent))
        own = [place.resolve() for place in (resources.folder("recipes"), resources.user_folder())]
        return tuple(folder for folder in found if not any(map(folder.is_relative_to, own)))

    @property
    def run_name(self) -> str:
        """The default name of its runs: its file name, made safe.

        >>> Recipe(path=Path("my run copy.yaml")).run_name
        'my_run_copy'
        """
        return safe_name(self.path.stem)


def shipped() -> dict[str, Path]:
    """Every recipe that ships with the launcher, by name."""
    return {path.stem: path for path in sorted(resources.folder("recipes").glob(f"*{SUFFIX}"))}


def find(recipe: str) -> Recipe:
    """The recipe of a shipped name, or of a path (with a ``/``, or ending in ``.yaml`` or ``.yml``).

    Raises:
        LauncherError: when there is none; names the nearest shipped name.
    """
    if "/" in recipe or recipe.endswith(_SUFFIXES):
        path = Path(os.path.expanduser(recipe))
        if not os.path.isfile(path):
            raise LauncherError(f"no recipe file at {recipe}. Shipped recipes go by name: trireme recipe ls.")
        return Recipe(path=path)
    known = shipped()
    local = next((f"./{recipe}{end}" for end in _SUFFIXES if os.path.isfile(f"{recipe}{end}")), "")
    if recipe in known:
        note = f"{known[recipe]} is used, and {local} is not; give {local} for that one" if local else ""
        return Recipe(path=known[recipe], note=note)
    here = f" A file is given by its path: {local}." if local else ""
    name = shortened(repr(recipe))
    raise LauncherError(f"no shipped recipe is called {name}. {did_you_mean(recipe, known)}{here}")


def description(path: Path) -> str:
    """The first comment line of a recipe, or "" where it begins otherwise."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        first = next(lines, "").strip()
    return first.lstrip("#").strip() if first.startswith("#") else ""
