"""Names of files and runs at the cursor.

A name with a control character, or that is no text, is never offered: it could change what the terminal
shows or be taken for several names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from launcher.app.find_runs import DEFAULT_ROOT
from launcher.runs.store import SWEEP_FILE, RunDirectory

Candidate = tuple[str, str]
"""A word, and what it means or "". One that ends in ``= . /`` is not whole yet."""


def paths(word: str, endings: tuple[str, ...] | None = None) -> Iterator[Candidate]:
    """Folders and files below the folder of ``word``; with ``endings`` only such files."""
    for path, entry in _entries(word):
        if _is_folder(entry):
            yield f"{path}/", ""
        elif endings is None or entry.name.endswith(endings):
            yield path, ""


def runs(word: str, *, from_here: bool = False) -> Iterator[Candidate]:
    """Run directories: by their name below ``runs``, unless told to begin ``from_here``, or by their path."""
    yield from _marked(word, RunDirectory(Path()).job.name, by_name=not from_here)


def sweeps(word: str) -> Iterator[Candidate]:
    """The directories of sweeps, by their name below ``runs`` or by their path."""
    yield from _marked(word, SWEEP_FILE, by_name=True)


def _marked(word: str, marker: str, *, by_name: bool) -> Iterator[Candidate]:
    """Folders that hold a file of that name, and the folders that may lead to them."""
    if by_name and "/" not in word:
        for path, entry in _entries(f"{DEFAULT_ROOT}/{word}"):
            if os.path.isfile(os.path.join(entry.path, marker)):
                yield path.removeprefix(f"{DEFAULT_ROOT}/"), ""
    for path, entry in _entries(word):
        if _is_folder(entry):
            yield (path if os.path.isfile(os.path.join(entry.path, marker)) else f"{path}/"), ""


def _entries(word: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """What lies in the folder of ``word`` and begins as it does, with its path as it would be typed."""
    folder, start = os.path.split(word)
    prefix = word[: len(word) - len(start)]
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
    except (OSError, ValueError):
        return
    for entry in entries:
        is_hidden = entry.name.startswith(".") and not start.startswith(".")
        if entry.name.startswith(start) and entry.name.isprintable() and not is_hidden:
            yield prefix + entry.name, entry


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
