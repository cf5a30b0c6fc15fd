"""Turns text files into one memory-mapped token file, made once, that only its user can read.

The file is named by the paths, sizes and times of its sources, so a changed source gets a new file, and a
later start does not read the text again. The first rank writes it while the others wait for its lock; it
appears by a rename, so no process ever sees a part of it. Where a file system has no locks, several write it.

    .tokens-UID/bytes-NAME.tokens    _MAGIC, the SHA-256 of the tokens, the tokens

What is damaged, a link, or of somebody else is never used, and made again. To see that, every rank that needs
tokens reads the file once at its start, at one to two GB a second.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.base.errors import LauncherError
from launcher.contract.data_files import find_files, refuse_other_than_text
from launcher.runtime.process.log import log

_MAGIC = b"trireme tokens 1\n"
_NUM_HEADER = len(_MAGIC) + hashlib.sha256().digest_size
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_tokens(source: str, cache: Path) -> NDArray[np.uint8]:
    """The tokens of all files of ``source`` in the order of their paths, memory-mapped: one per byte.

    Raises:
        ConfigError: when the source has no file, or one that is no text.
        LauncherError: when the cache folder cannot be written, or others can write in it.
    """
    files = find_files(source)
    folder = cache / f".tokens-{os.geteuid()}"
    path = folder / _name(files)
    try:
        _make_folder(folder)
        opened = _opened(path, log)
        if opened is None:
            with os.fdopen(_open(folder / "lock", os.O_RDWR | os.O_CREAT), "wb") as lock:
                with suppress(OSError):  # two that write at once do no harm
                    fcntl.flock(lock, fcntl.LOCK_EX)
                opened = _opened(path)
                if opened is None:
                    refuse_other_than_text(source, files)
                    _write(files, path)
                    opened = _opened(path)
    except OSError as error:
        fix = "Set data.cache_dir to a folder you can write."
        raise LauncherError(f"the token file {path} cannot be written: {error}. {fix}") from error
    assert opened is not None, f"{path} was written and is not there"
    return opened


def _name(files: Sequence[Path]) -> str:
    """Name of the token file of these sources."""
    facts = [(os.path.abspath(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return f"bytes-{digest[:32]}.tokens"


def _make_folder(folder: Path) -> None:
    """Makes the folder, which is for this user alone.

    Raises:
        OSError: when that fails, or there is something else of its name.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or _is_of_others(facts):
        raise PermissionError(f"{folder} is not a folder in which this user alone can write")


def _is_of_others(facts: os.stat_result) -> bool:
    return facts.st_uid != os.geteuid() or bool(facts.st_mode & _OTHERS_WRITE)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _opened(path: Path, tell: Callable[[str], None] = lambda text: None) -> NDArray[np.uint8] | None:
    """The tokens of a file as it was written; None where there is none, after having told why."""
    if not os.path.lexists(path):
        return None
    with suppress(OSError), os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        facts = os.fstat(file.fileno())
        if stat.S_ISREG(facts.st_mode) and not _is_of_others(facts):
            header, found = file.read(_NUM_HEADER), hashlib.file_digest(file, "sha256")
            if header == _MAGIC + found.digest():
                return np.memmap(file, dtype=np.uint8, mode="r", offset=_NUM_HEADER)
    tell(f"{path} is damaged, or was not written by this user: it is passed over and made again")
    return None


def _write(files: Sequence[Path], path: Path) -> None:
    """Joins the files under a temporary name, then renames."""
    handle, unfinished = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w+b") as out:
            out.write(bytes(_NUM_HEADER))
            for source in files:
                with source.open("rb") as file:
                    shutil.copyfileobj(file, out)
            out.seek(_NUM_HEADER)
            digest = hashlib.file_digest(out, "sha256").digest()
            out.seek(0)
            out.write(_MAGIC + digest)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
