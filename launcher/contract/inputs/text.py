"""Digests of text files, which take little time however long the files are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

_BLOCK_BYTES, _NUM_BLOCKS = 256 * 1024, 256


def blocks_per_file(files: Sequence[Path]) -> int:
    """How many blocks of each file are read for its digest: 64 MiB of all of them, and a block of each."""
    return max(1, _NUM_BLOCKS // len(files))


def file_digests(files: Sequence[Path], num_blocks: int) -> dict[str, str]:
    """Size and digest of each file, by its path below the folder that holds all.

    A file of at most ``num_blocks`` blocks of 256 KiB is read whole. Of a longer one as many are read, evenly
    spaced from its first to its last byte: a change between two of them that keeps its size is not found.
    """
    paths = [os.path.abspath(file) for file in files]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    return {os.path.relpath(path, folder): _file_digest(Path(path), num_blocks) for path in paths}


def _file_digest(path: Path, num_blocks: int) -> str:
    digest, size = hashlib.sha256(), path.stat().st_size
    starts: Sequence[int] = range(0, size, _BLOCK_BYTES)
    if len(starts) > num_blocks:
        starts = [(size - _BLOCK_BYTES) * block // max(1, num_blocks - 1) for block in range(num_blocks)]
    with path.open("rb", buffering=0) as file:
        for start in starts:
            digest.update(os.pread(file.fileno(), _BLOCK_BYTES, start))
    return f"{size} bytes, {digest.hexdigest()}"
