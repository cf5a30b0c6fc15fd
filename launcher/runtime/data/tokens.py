"""Turns text files into one memory-mapped token file, made once per node.

The file is named by the paths, sizes and times of its sources, so a changed source gets a new file, and a
later start does not read the text again. The first rank writes it while the others wait for its lock; it
appears by a rename, so no process ever sees a part of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.base.errors import LauncherError
from launcher.contract.data_files import find_files, num_bytes, refuse_other_than_text


def open_tokens(source: str, cache: Path) -> NDArray[np.uint8]:
    """The tokens of all files of ``source`` in the order of their paths, memory-mapped: one per byte.

    Raises:
        ConfigError: when the source has no file, or one that is no text.
        LauncherError: when the cache folder cannot be written.
    """
    files = find_files(source)
    path = cache / _name(files)
    try:
        _make_once(source, files, path)
    except OSError as error:
        fix = "Set data.cache_dir to a folder you can write."
        raise LauncherError(f"the token file {path} cannot be written: {error}. {fix}") from error
    return np.memmap(path, dtype=np.uint8, mode="r")


def _name(files: Sequence[Path]) -> str:
    """Name of the token file of these sources."""
    facts = [(os.path.abspath(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return f"bytes-{digest[:32]}.tokens"


def _make_once(source: str, files: Sequence[Path], path: Path) -> None:
    """Makes the token file unless it exists and is complete; one process of this node at a time."""
    size = num_bytes(files)

    def is_complete() -> bool:
        return path.is_file() and path.stat().st_size == size

    if is_complete():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_complete():
            refuse_other_than_text(source, files)
            _write(files, path)


def _write(files: Sequence[Path], path: Path) -> None:
    """Joins the files under a temporary name, then renames."""
    handle, unfinished = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            for source in files:
                with source.open("rb") as file:
                    shutil.copyfileobj(file, out)
        os.chmod(unfinished, 0o644)  # others may share the cache
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
