"""Files that ranks append to, read as they grow and from their end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO
from weakref import finalize

_TAIL_BYTES = 65536


class Tail:
    """What is appended to a file, as it comes. One that became shorter is read from its start; where another
    file of the same name has taken its place, what was left of it comes first."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """``from_end``: what is there already is left out."""
        self._path = path
        self._file: BinaryIO | None = None
        if from_end and path.is_file():
            self._open().seek(0, os.SEEK_END)

    def read(self, *, to_end: bool = False) -> bytes:
        """What is new, in whole lines; ``to_end``: also a last one that is not whole."""
        found = self._rest(to_end=to_end)
        if self._path.is_file() and self._is_another():
            if self._file is not None:
                self._file.close()
            self._open()
            found += self._rest(to_end=to_end)
        return found

    def _open(self) -> BinaryIO:
        self._file = file = self._path.open("rb")
        finalize(self, file.close)
        return file

    def _is_another(self) -> bool:
        """Whether the name is not that of the open file."""
        return self._file is None or not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())

    def _rest(self, *, to_end: bool) -> bytes:
        if self._file is None:
            return b""
        position = self._file.tell()
        if os.fstat(self._file.fileno()).st_size < position:
            position = self._file.seek(0)
        new = self._file.read()
        whole = new if to_end else new[: new.rfind(b"\n") + 1]
        self._file.seek(position + len(whole))
        return whole


def last_lines(path: Path) -> list[bytes]:
    """The whole lines in the last 64 KiB of a file."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")[:-1]
    return lines[1:] if start else lines
