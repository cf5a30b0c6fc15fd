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
    for path, place in _entries(word):
        if os.path.isdir(place):
            yield f"{path}/", ""
        elif endings is None or path.endswith(endings):
            yield path, ""


def runs(word: str, kinds: Sequence[str] = ("RUN",), *, from_here: bool = False) -> Iterator[Candidate]:
    """Directories of runs, of sweeps, or of both, and the folders that may lead to them.

    They go by their path, and by their name below ``runs`` unless told to begin ``from_here``.
    """
    markers = [_MARKERS[kind] for kind in kinds]
    if not from_here and "/" not in word:
        for path, place in _entries(f"{DEFAULT_ROOT}/{word}"):
            if _holds(place, markers):
                yield path.removeprefix(f"{DEFAULT_ROOT}/"), ""
    for path, place in _entries(word):
        if os.path.isdir(place):
            yield (path if _holds(place, markers) else f"{path}/"), ""


def _entries(word: str) -> Iterator[tuple[str, str]]:
    """What lies in the folder of ``word`` and begins as it does: as it would be typed, and its path."""
    folder, start = os.path.split(word)
    place = os.path.expanduser(folder) or "."
    try:
        names = sorted(os.listdir(place))
    except (OSError, ValueError):
        return
    for name in names:
        if name.startswith(start) and (start.startswith(".") or not name.startswith(".")):
            yield word.removesuffix(start) + name, os.path.join(place, name)


def _holds(folder: str, markers: Sequence[str]) -> bool:
    return any(os.path.isfile(os.path.join(folder, marker)) for marker in markers)
