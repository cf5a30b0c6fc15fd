"""Files that are whole or absent, and never written over another one unasked."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.base.errors import LauncherError


def check_new(path: Path, flag: str) -> None:
    """Refuses a file that exists, before any work is done for it.

    Raises:
        LauncherError: naming the flag.
    """
    if os.path.lexists(path):
        raise LauncherError(f"--{flag} {path}: the file already exists. Remove it, or give another name.")


def write_new(path: Path, text: str, flag: str) -> None:
    """Writes a new file; an existing one is never replaced.

    Raises:
        LauncherError: as `check_new`, and when the file cannot be written.
    """
    check_new(path, flag)
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LauncherError(f"--{flag} {path}: {reason}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a file such that whoever reads it finds all of the text, or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
