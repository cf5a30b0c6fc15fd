"""Files that ranks append to, read as they grow and from their end."""

from __future__ import annotations

import os
from pathlib import Path

_TAIL_BYTES = 65536


class Tail:
    """What is appended to a file, as it comes. One that became shorter, or is another file of the same name,
    is read from its start."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """``from_end``: what is there already is left out."""
        self._path = path
        known = path.stat() if from_end and path.exists() else None
        self._position, self._inode = (known.st_size, known.st_ino) if known else (0, -1)

    def read(self, *, to_end: bool = False) -> bytes:
        """What is new, in whole lines; ``to_end``: also a last one that is not whole."""
        if not self._path.is_file():
            return b""
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._position:
                self._position, self._inode = 0, found.st_ino
            file.seek(self._position)
            new = file.read()
        whole = new if to_end else new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        return whole


def last_lines(path: Path) -> list[bytes]:
    """The whole lines in the last 64 KiB of a file."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")[:-1]
    return lines[1:] if start else lines
