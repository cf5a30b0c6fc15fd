"""Files that are whole or absent and never written over another one unasked, and safe names for them."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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


def write_whole(path: Path, text: str, *, is_durable: bool = False) -> None:
    """Writes a file atomically: a reader finds all of the text, or the previous file.

    ``is_durable``: the text is on the disk before the file has its name, so that no loss of power cuts it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = unfinished_path(path)
    try:
        with naming(path):
            unfinished.write_text(text, encoding="utf-8", errors="surrogateescape")
            if is_durable:
                bring_to_disk(unfinished)
            unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def unfinished_path(path: Path) -> Path:
    """Where `write_whole` writes what is to be the file."""
    return path.with_name(f".{path.name}.unfinished")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has errors of the system name the file where they do not, as those of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_regular(path: Path) -> bytes:
    """The content of a file. What is none, such as a pipe, is not waited for.

    Raises:
        OSError: when it is missing, not a regular file, or cannot be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where the file is missing, truncated or no such object."""
    with suppress(OSError):
        return json_object(read_regular(path)) or {}
    return {}


def json_object(text: bytes) -> dict[str, Any] | None:
    """The object that a text is; None for what a process that was killed has left half written."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else None
    return None


def bring_to_disk(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def safe_name(text: str) -> str:
    """The nearest name of a file or a job: one harmless path component of at most 100 characters.

    >>> safe_name("Big simulation; rm -rf /"), safe_name("../x"), safe_name("..")
    ('Big_simulation_rm_-rf', 'x', 'run')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:100] or "run"
