"""Writes token ids as Megatron does, a ``.bin`` with its ``.idx``: whole or absent."""

from __future__ import annotations

import os
import tempfile
from array import array
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.base.files import bring_to_disk
from launcher.contract.data.token_files import FORMATS, INDEX_HEADER, MAGIC, bin_and_index

_LARGEST = {256: "u1", 1 << 16: "<u2"}


def format_of(num_ids: int) -> str:
    """The smallest format that holds a vocabulary and that Megatron reads.

    >>> format_of(256), format_of(50257), format_of(128256)
    ('u1', '<u2', '<i4')
    """
    return next((dtype for limit, dtype in _LARGEST.items() if num_ids <= limit), "<i4")


class PairWriter:
    """A pair of files that gets its names when all is written. Each document is a sequence."""

    def __init__(self, path: Path, dtype: str) -> None:
        """``path``: without suffix."""
        self._path, self._dtype = path, np.dtype(dtype)
        self._lengths = array("i")
        self.num_tokens, self.highest = 0, -1
        handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)  # 0600
        self._unfinished = Path(name)
        self._file = os.fdopen(handle, "wb", buffering=1 << 20)

    @property
    def num_sequences(self) -> int:
        """Documents so far."""
        return len(self._lengths)

    def add(self, ids: NDArray[np.integer]) -> None:
        """Adds a document; one without ids is none."""
        if not len(ids):
            return
        self._file.write(np.ascontiguousarray(ids, self._dtype).data)
        self._lengths.append(len(ids))
        self.num_tokens += len(ids)
        self.highest = max(self.highest, int(ids.max()))

    def close(self) -> None:
        """Gives both files their names, the index last."""
        content, index = bin_and_index(self._path)
        self._file.close()
        bring_to_disk(self._unfinished)
        self._unfinished.replace(content)
        with open(os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(index_bytes(np.frombuffer(self._lengths, dtype=np.int32), self._dtype.str))
        bring_to_disk(self._unfinished)
        self._unfinished.replace(index)

    def discard(self) -> None:
        """Leaves nothing of it."""
        self._file.close()
        with suppress(FileNotFoundError):
            self._unfinished.unlink()


def index_bytes(lengths: NDArray[np.int32], dtype: str) -> bytes:
    """An index of one sequence per document."""
    code = next(code for code, known in FORMATS.items() if known[-2:] == dtype[-2:])
    width = int(dtype[-1])
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], out=pointers[1:])
    header = INDEX_HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    return header + lengths.astype("<i4").tobytes() + (pointers * width).tobytes() + documents.tobytes()
