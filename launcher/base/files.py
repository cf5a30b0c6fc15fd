"""Files that are whole or absent and never written over another one unasked, and safe names for them."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.base.errors import LauncherError

_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOR_GROUP = 0o027
"""The umask under which a group may read, and others nothing."""


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

    Raises:
        OSError: also where its folder is not there, which may have been moved: it is not made again.
    """
    unfinished = unfinished_path(path)
    try:
        with naming(path):
            unfinished.write_text(text, encoding="utf-8", errors="surrogateescape")
            share_alike(unfinished, path.parent)  # the umask of a process that looks at a run may be another
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


def share(folder: Path, group: str | None = None) -> None:
    """Lets a group read a folder with all that is in it, and what this process and those that it starts make
    in it later. Nobody else than the owner may write. ``group``: None: that of the folder.

    Raises:
        LookupError: when there is no such group.
        OSError: when the owner is not in it.
    """
    os.umask(_FOR_GROUP)
    for path in [folder, *folder.rglob("*")]:
        if path.is_symlink():
            continue
        if group is not None:
            shutil.chown(path, group=group)  # clears setgid
        more = stat.S_IRGRP
        if path.is_dir():
            more |= stat.S_IXGRP | (0 if group is None else stat.S_ISGID)  # what is made in it has the group
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_WRITE_OF_OTHERS | more)


def share_alike(path: Path, folder: Path) -> None:
    """Lets the group that may read what is in ``folder`` read a new file; only the owner may write it."""
    if folder.stat().st_mode & 0o050 == 0o050:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_WRITE_OF_OTHERS | stat.S_IRGRP)


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
