"""Writes a run's newest checkpoint as a Hugging Face model.

`python -m launcher.runtime.checkpoint.export RUN FOLDER`

The files are written one after the other, each read from the checkpoint's shards: the process holds the
tensors of one file, whatever the model's size.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from launcher.base.errors import LauncherError
from launcher.base.units import counted
from launcher.contract.model.config_json import ORIGINAL, config_of
from launcher.contract.model.folder import INDEX, WEIGHTS
from launcher.contract.model.formats import CONFIG
from launcher.contract.model.tensors import FileTensor, file_tensors
from launcher.contract.plan import Plan
from launcher.runtime.api import DTYPES, FragmentReader
from launcher.runtime.checkpoint import store as checkpoint
from launcher.runtime.checkpoint.fragments import state_name
from launcher.runtime.train.gradient_buckets import in_buckets

_FILE_BYTES = 5_000_000_000
"""Most bytes of a file, as in Hugging Face's own tools."""


def main(argv: list[str] | None = None) -> int:
    """Exports one run. Returns the exit code."""
    parser = argparse.ArgumentParser(description="A checkpoint as a Hugging Face model")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("folder", type=Path, help="folder to write, which must be new")
    arguments = parser.parse_args(argv)
    try:
        step, num_files = export(arguments.run, arguments.folder)
    except (LauncherError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{arguments.folder}: the model after {step} steps, in {counted(num_files, 'file')} of weights")
    return 0


def export(run: Path, folder: Path, file_bytes: int = _FILE_BYTES) -> tuple[int, int]:
    """Writes the folder; returns the checkpoint's step and the number of files of weights.

    Raises:
        JobError: when the run has no intact checkpoint, or the format cannot hold its model.
        OSError: when the folder already exists, or cannot be written.
    """
    plan = Plan.from_json((run / "plan.json").read_text(encoding="utf-8"))
    model, seq_length = plan.config.model, plan.batch.seq_length
    dtype = DTYPES[plan.config.precision.compute]
    tensors = file_tensors(model, seq_length)
    root = run / "checkpoints"
    step, skipped = checkpoint.newest(root)
    for sentence in skipped:
        print(sentence, file=sys.stderr)
    read = checkpoint.Checkpoint(checkpoint.folder_of(root, step)).read
    kept = run / ORIGINAL
    original = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
    config = config_of(model, seq_length, str(dtype).removeprefix("torch."), original)
    folder.mkdir(parents=True)
    _write_json(folder / CONFIG, config)

    def num_bytes(tensor: FileTensor) -> int:
        return prod(tensor.shape) * dtype.itemsize

    files = in_buckets(tensors, num_bytes, file_bytes)
    stem, _, ending = WEIGHTS.partition(".")
    numbered = [f"{stem}-{number:05d}-of-{len(files):05d}.{ending}" for number in range(1, len(files) + 1)]
    names = numbered if len(files) > 1 else [WEIGHTS]
    for name, content in zip(names, files, strict=True):
        weights = {tensor.name: joined(tensor, read).to(dtype) for tensor in content}
        save_file(weights, folder / name, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG, folder / name)  # safetensors lets only the owner read its files
    if len(files) > 1:
        total = sum(map(num_bytes, tensors))
        where = {tensor.name: name for name, content in zip(names, files, strict=True) for tensor in content}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return step, len(files)


def joined(tensor: FileTensor, read: FragmentReader) -> Tensor:
    """A tensor of the file, made of ours."""
    parts = [read(state_name("weight", name), (0,) * len(shape), shape) for name, shape in tensor.parts]
    rows = torch.cat(parts)
    return rows.T.contiguous() if tensor.is_transposed else rows


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
