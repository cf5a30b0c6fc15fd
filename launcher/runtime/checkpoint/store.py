"""Checkpoints for any layout: safetensors shards, every piece under its global name.

    checkpoints/step-00000040/
      shard-00000.safetensors    the pieces one rank owns
      shard-00000.json           for each piece: global name and shape, its offset and shape; checksum
      complete.json              step, order of the samples, number of shards, checksum of each index and its
                                 own; written last

A directory is written under a temporary name, synced to the disk, read back, and renamed when it is
complete, so a crash while saving never harms an earlier checkpoint. A box of a global tensor is read from
all shards that overlap it. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launcher.base.errors import JobError
from launcher.base.files import bring_to_disk, write_whole
from launcher.contract.job import checkpoint_name
from launcher.runtime.api import NEWEST_ORDER
from launcher.runtime.checkpoint.fragments import WEIGHT, NotSavedError, state_name
from launcher.runtime.checkpoint.shard import FAILED, VERSION, sha256_of

_MARKER, _FOLDERS, _INDICES = "complete.json", "step-????????", "shard-*.json"
_MOMENT = "exp_avg"
"""The kind of state that a checkpoint of earlier versions has of every parameter that is trained."""
DAMAGE = (JobError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What opening a damaged checkpoint raises."""
_UNFINISHED, _REPLACED = ".unfinished", ".replaced"
_LOOK_INTERVAL_S = 0.02


def unfinished_folder(root: Path, step: int) -> Path:
    """Makes the empty folder for the shards of a step. One rank calls it before any rank saves."""
    for left in (*root.glob(f"*{_UNFINISHED}"), *root.glob(f"*{_REPLACED}")):  # by a save that did not finish
        shutil.rmtree(left)
    folder = unfinished_name(root, step)
    with suppress(FileExistsError):
        root.mkdir()
    folder.mkdir()
    return folder


def unfinished_name(root: Path, step: int) -> Path:
    """The path of `unfinished_folder`."""
    final = folder_of(root, step)
    return final.with_name(final.name + _UNFINISHED)


def complete(
    root: Path,
    step: int,
    num_shards: int,
    timeout_s: float = 0,
    may_write: Callable[[], None] = lambda: None,
    *,
    sample_order: int = NEWEST_ORDER,
) -> None:
    """Turns the unfinished folder into a checkpoint, once every rank has saved its shard there, and
    ``may_write`` has been asked.

    Raises:
        JobError: when a rank could not save its shard, or one is missing after ``timeout_s``.
    """
    unfinished, final = unfinished_name(root, step), folder_of(root, step)
    deadline = time.monotonic() + timeout_s
    while (found := len(list(unfinished.glob(_INDICES)))) != num_shards:
        if failed := sorted(unfinished.glob(f"shard-*{FAILED}")):
            raise JobError(f"{failed[0].stem} was not written: {failed[0].read_text(encoding='utf-8')}")
        if time.monotonic() >= deadline:
            raise JobError(
                f"{unfinished} has {found} of {num_shards} shards; is the run directory shared by all nodes?"
            )
        time.sleep(_LOOK_INTERVAL_S)
    may_write()
    write_marker(unfinished, step, sample_order)
    bring_to_disk(unfinished)
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():  # the same step, saved again after a resume from an earlier one
        final.rename(replaced)
    unfinished.rename(final)
    bring_to_disk(root)
    shutil.rmtree(replaced, ignore_errors=True)


def write_marker(folder: Path, step: int, sample_order: int = NEWEST_ORDER) -> None:
    """Writes down which indices the checkpoint in ``folder`` has, and by which version of the order of the
    samples its training goes on."""
    digests = {path.name: sha256_of(path) for path in sorted(folder.glob(_INDICES))}
    marker = {
        "version": VERSION,
        "step": step,
        "sample_order": sample_order,
        "num_shards": len(digests),
        "indices": digests,
    }
    write_whole(folder / _MARKER, json.dumps(marker | {"sha256": _digest(marker)}), is_durable=True)


def _digest(marker: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()


def _read_marker(folder: Path) -> dict[str, Any]:
    """What the marker of a checkpoint says; earlier versions wrote no checksums.

    Raises:
        JobError: when it is not as it was written.
    """
    marker: dict[str, Any] = json.loads((folder / _MARKER).read_bytes())
    if marker["version"] != VERSION:
        raise JobError(f"{folder} has version {marker['version']}, this launcher reads {VERSION}")
    expected, digests = marker.pop("sha256", None), marker.get("indices", {})
    if expected != (_digest(marker) if digests else None):
        raise JobError(f"{folder / _MARKER} is damaged: its SHA-256 is not the recorded one")
    return marker


def _read_index(path: Path, digest: str | None) -> dict[str, Any]:
    """The index of a shard.

    Raises:
        JobError: when it is missing, or not as it was written.
    """
    text = path.read_bytes() if path.exists() else b""
    if digest is not None and hashlib.sha256(text).hexdigest() != digest:
        raise JobError(f"{path} is missing or damaged: its SHA-256 is not the recorded one")
    index: dict[str, Any] = json.loads(text)
    return index


def folder_of(root: Path, step: int) -> Path:
    """The checkpoint folder of a step."""
    return root / checkpoint_name(step)


def prune(root: Path, step: int, keep: int, every: int = 0) -> None:
    """Removes the oldest checkpoints so that ``keep`` are left up to ``step``, the newest intact one, beside
    those after a multiple of ``every`` steps (0: none).

    Newer ones are not removed: they are from before a resume, and may be damaged.
    """
    known = [path for path in sorted(root.glob(_FOLDERS)) if path <= folder_of(root, step)]
    for old in known[:-keep]:
        if not every or int(old.name.removeprefix("step-")) % every:
            shutil.rmtree(old)


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """Where a part of a global tensor is stored."""

    shard: Path
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Checkpoint:
    """A complete checkpoint, opened for reading any box of any global tensor.

    A shard's checksum is verified before the first read from it.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the indices.

        Raises:
            JobError: when a shard is missing, or an index is damaged.
        """
        marker = _read_marker(folder)
        self.step: int = marker["step"]
        self.sample_order: int = marker.get("sample_order", 1)
        """Version of the order of the samples by which its training goes on."""
        self._pieces: dict[str, list[StoredPiece]] = defaultdict(list)
        self._unverified: dict[Path, str] = {}
        digests = marker.get("indices") or dict.fromkeys(path.name for path in folder.glob(_INDICES))
        if len(digests) != marker["num_shards"]:
            raise JobError(f"{folder} has {len(digests)} of {marker['num_shards']} shards")
        for name, digest in sorted(digests.items()):
            index, shard = _read_index(folder / name, digest), (folder / name).with_suffix(".safetensors")
            self._unverified[shard] = index["sha256"]
            for piece in index["pieces"]:
                offset, shape = tuple(piece["offset"]), tuple(piece["shape"])
                stored = StoredPiece(shard=shard, key=piece["key"], offset=offset, shape=shape)
                self._pieces[piece["name"]].append(stored)

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of ``shape`` that begins at ``offset`` in the global tensor ``name``.

        Raises:
            JobError: when the stored pieces do not cover it, or a shard is damaged.
        """
        box: Tensor | None = None
        num_filled = 0
        for piece in self._pieces.get(name, ()):
            overlap = _overlap(offset, shape, piece.offset, piece.shape)
            if overlap is None:
                continue
            self._verify(piece.shard)
            with safe_open(piece.shard, framework="pt") as shard:
                stored = shard.get_slice(piece.key)
                source = tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, piece.offset, strict=True))
                part: Tensor = stored[source] if source else shard.get_tensor(piece.key)
            if box is None:
                box = torch.empty(tuple(shape), dtype=part.dtype)
            box[tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, offset, strict=True))] = part
            num_filled += part.numel()
        if box is None or num_filled != box.numel():
            error = JobError if self._pieces.get(name) or self._has_frozen() else NotSavedError
            raise error(
                f"the checkpoint does not hold all of {name} at {tuple(offset)} size {tuple(shape)}: it is "
                "of another model. Use the code and the settings of the run that wrote it."
            )
        return box

    def _has_frozen(self) -> bool:
        """Whether it holds weights without moments, those that are not trained, as earlier versions
        did not save them."""
        names = (name.removeprefix(state_name(WEIGHT, "")) for name in self._pieces)
        return any(
            state_name(WEIGHT, name) in self._pieces and state_name(_MOMENT, name) not in self._pieces
            for name in names
        )

    def verify(self) -> None:
        """Checks every shard.

        Raises:
            JobError: when one is damaged.
        """
        for shard in list(self._unverified):
            self._verify(shard)

    def _verify(self, shard: Path) -> None:
        expected = self._unverified.pop(shard, None)
        if expected is None:
            return
        if not shard.exists() or sha256_of(shard) != expected:
            raise JobError(f"{shard} is missing or damaged: its SHA-256 is not the recorded one")
        try:
            with safe_open(shard, framework="pt"):
                pass
        except SafetensorError as error:  # no other format is tried
            raise JobError(f"{shard} is no safetensors file: {error}") from None


def newest(root: Path) -> tuple[int, list[str]]:
    """Step of the newest intact checkpoint, and a sentence for each newer one that is damaged.

    Raises:
        JobError: when there is none.
    """
    skipped: list[str] = []
    for folder in sorted(root.glob(_FOLDERS), reverse=True):
        try:
            found = Checkpoint(folder)
            found.verify()
            return found.step, skipped
        except DAMAGE as error:
            skipped.append(f"{folder.name} was skipped: {error}")
    if skipped:
        raise JobError(
            "\n".join([f"no checkpoint in {root} is whole; start anew with --overwrite", *skipped])
        )
    raise JobError(f"no intact checkpoint in {root}; set train.checkpoint_interval and start a new run")


def _overlap(
    offset: Sequence[int], shape: Sequence[int], other_offset: Sequence[int], other_shape: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Begin and end of the common box in each dim, or None where there is none."""
    spans = []
    for begin, size, other, other_size in zip(offset, shape, other_offset, other_shape, strict=True):
        low, high = max(begin, other), min(begin + size, other + other_size)
        if low >= high:
            return None
        spans.append((low, high))
    return spans
