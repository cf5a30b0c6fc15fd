"""The part of a checkpoint that one rank writes: synced to the disk, read back, and only then announced."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from launcher.base.errors import JobError
from launcher.base.files import bring_to_disk, share_alike, write_whole
from launcher.runtime.api import GlobalFragment

VERSION = 1
"""Format of the index."""
FAILED = ".failed"
"""Suffix of the file in which a rank explains why its shard is missing."""


def save_shard(
    folder: Path,
    rank: int,
    fragments: Sequence[GlobalFragment],
    may_write: Callable[[], None] = lambda: None,
) -> int:
    """Writes the fragments that one rank owns; returns their bytes. The index comes last: where it exists,
    the shard is on the disk and correct. ``may_write``: asked before each of the two.

    Raises:
        OSError: when it cannot be written.
        JobError: when the disk does not return what was written.
    """
    shard = folder / f"shard-{rank:05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    pieces = []
    for number, fragment in enumerate(fragments):
        where, shape = fragment.slice, list(fragment.tensor.shape)
        key = f"{number}:{where.name}"
        tensors[key] = fragment.tensor.detach().cpu().contiguous()
        box = {"global_shape": where.shape, "offset": where.offset, "shape": shape}
        pieces.append({"key": key, "name": where.name, **box})
    may_write()
    save_file(tensors, shard)
    share_alike(shard, folder.parent.parent)  # it has made it for the owner alone
    bring_to_disk(shard)
    _check_written(shard, tensors)
    may_write()
    index = {"version": VERSION, "sha256": sha256_of(shard), "pieces": pieces}
    write_whole(shard.with_suffix(".json"), json.dumps(index), is_durable=True)
    return sum(tensor.nbytes for tensor in tensors.values())


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Tells the rank that waits for all shards that this one is not written, and why."""
    with suppress(OSError):
        (folder / f"shard-{rank:05d}{FAILED}").write_text(str(error), encoding="utf-8")


def _check_written(shard: Path, tensors: dict[str, Tensor]) -> None:
    """Compares the file on the disk with the tensors."""
    if hasattr(os, "posix_fadvise"):  # so that it is read from the disk, not from the page cache
        with shard.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with safe_open(shard, framework="pt") as stored:
        for key, tensor in tensors.items():
            found = stored.get_tensor(key)
            if found.dtype != tensor.dtype or not torch.equal(_bytes(found), _bytes(tensor)):
                raise JobError(f"{shard} is damaged: {key} is read back from the disk as something else")


def _bytes(tensor: Tensor) -> Tensor:
    """As bytes, so that a NaN is equal to itself."""
    return tensor.reshape(-1).view(torch.uint8)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
