"""Finds the data folders that ship beside the code, and the one that a person has."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.base.errors import LauncherError


def user_folder() -> Path:
    """Where a person keeps groups of their own, by the XDG base directory rule: ``site/NAME.yaml``."""
    root = os.environ.get("XDG_CONFIG_HOME")
    return (Path(root) if root else Path.home() / ".config") / "trireme"


def folder(name: str) -> Path:
    """The folder ``conf``, ``recipes`` or ``slurm``, from an installed wheel or from a checkout.

    Raises:
        LauncherError: when it is in neither place; names both.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data" / name
    checkout = package.parent / name
    for candidate in (installed, checkout):
        if candidate.is_dir():
            return candidate
    raise LauncherError(
        f"the folder {name!r} is neither at {installed} nor at {checkout}; reinstall trireme-launcher"
    )
