"""Finds the data folders that ship with the code, and the user's own."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.base.errors import LauncherError

_PACKAGE = Path(__file__).resolve().parents[1]


def user_folder() -> Path:
    """The user's own config groups (``site/NAME.yaml``), by the XDG base directory specification."""
    root = os.environ.get("XDG_CONFIG_HOME")
    return (Path(root) if root else home_folder() / ".config") / "trireme"


def home_folder() -> Path:
    """The user's home folder; where there is none, as in some containers, one that does not exist."""
    home = os.path.expanduser("~")
    return Path(home if home != "~" else "/nonexistent")


def folder(name: str) -> Path:
    """The folder ``conf``, ``recipes`` or ``slurm``, from an installed wheel or from a checkout.

    Raises:
        LauncherError: when it is in neither; names both.
    """
    return _first(name, _PACKAGE / "_data" / name, _PACKAGE.parent / name)


def pages() -> Path:
    """The folder that holds README.md, and a folder with a README.md for each top folder.

    Raises:
        LauncherError: as `folder`.
    """
    return _first("docs", _PACKAGE / "_data" / "docs", _PACKAGE.parent)


def _first(name: str, installed: Path, checkout: Path) -> Path:
    for candidate in (installed, checkout):
        if candidate.is_dir():
            return candidate
    raise LauncherError(
        f"the folder {name!r} is neither at {installed} nor at {checkout}; reinstall trireme-launcher"
    )
