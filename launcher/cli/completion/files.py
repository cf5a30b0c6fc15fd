"""Names of files and runs at the cursor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.app.lookup import DEFAULT_ROOT
from launcher.runs.store import SWEEP_FILE, RunDirectory

_MARKERS = {"RUN": RunDirectory(Path()).job.name, "SWEEP": SWEEP_FILE}
"""What a directory of each kind holds."""
Candidate = tuple[str, str]
"""A word, and what it means or "". One that ends in ``= . /`` is not whole yet."""


def paths(word: str, endings: tuple[str, ...] | None = None) -> Iterator[Candidate]:
    """Folders and files below the folder of ``word``; with ``endings`` only such files."""
    for path, entry in _entries(word):
        if _is_folder(entry):
            yield f"{path}/", ""
        elif endings is None or entry.name.endswith(endings):
            yield path, ""


def runs(word: str, kinds: Sequence[str] = ("RUN",), *, from_here: bool = False) -> Iterator[Candidate]:
    """Directories of runs, of sweeps, or of both, and the folders that may lead to them.

    They go by their path, and by their name below ``runs`` unless told to begin ``from_here``.
    """
    markers = [_MARKERS[kind] for kind in kinds]
    if not from_here and "/" not in word:
        for path, entry in _entries(f"{DEFAULT_ROOT}/{word}"):
            if _holds(entry, markers):
                yield path.removeprefix(f"{DEFAULT_ROOT}/"), ""
    for path, entry in _entries(word):
        if _is_folder(entry):
            yield (path if _holds(entry, markers) else f"{path}/"), ""


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
        if entry.name.startswith(start) and not is_hidden:
            yield prefix + entry.name, entry


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _holds(entry: os.DirEntry[str], markers: Sequence[str]) -> bool:
    return any(os.path.isfile(os.path.join(entry.path, marker)) for marker in markers)
