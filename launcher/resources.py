"""Finds the data folders that ship beside the code."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import LauncherError


def folder(name: str) -> Path:
    """The folder ``conf``, ``recipes`` or ``slurm``, from an installed wheel or from a checkout.

    Raises:
        LauncherError: when it is in neither place; names both.
    """
    package = Path(__file__).resolve().parent
    installed = package / "_data" / name
    checkout = package.parent / name
    for candidate in (installed, checkout):
        if candidate.is_dir():
            return candidate
    raise LauncherError(
        f"the folder {name!r} is neither at {installed} nor at {checkout}; reinstall trireme-launcher"
    )
