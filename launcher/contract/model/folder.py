"""A folder in Hugging Face's format: its files, and where each tensor of a recipe's model is in them.

Only JSON and the headers of safetensors files are read. Nothing in a folder is trusted: it may have been
downloaded, in part or from anybody.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from launcher.base.errors import ConfigError, Fault
from launcher.contract.config import LaunchConfig, ModelConfig
from launcher.contract.model.checkpoint import source_checkpoint
from launcher.contract.model.config_faults import SETTING, config_faults
from launcher.contract.model.formats import CONFIG
from launcher.contract.model.tensors import PREFIXES, UNUSED, FileTensor, file_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""All tensors in one file, or the index of several."""
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SAVE = "Give a folder written by trireme export, or by Hugging Face's save_pretrained."
_NUMBER_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Formats of numbers that weights are read from."""
_MAX_JSON_BYTES = 100_000_000
"""Of any JSON; the limit that safetensors has for its headers."""
_NUM_SHOWN = 3
"""Tensors that a fault names."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor is."""

    file: Path
    name: str
    shape: tuple[int, ...]


def initial_weights_faults(config: LaunchConfig, *, is_needed: bool = True) -> list[Fault]:
    """What is wrong with the initial weights of a recipe that come from a folder in the format.

    ``is_needed``: whether it is a fault that the folder is not on this machine.
    """
    given = config.train.init_from
    if given is None or source_checkpoint(config.train) is not None:
        return []
    if not (is_needed or os.path.isdir(os.path.expanduser(given))):
        return []
    try:
        locate(given, config.model, config.batch.seq_length)
    except ConfigError as error:
        return list(error.faults)
    return []


def locate(folder: str, model: ModelConfig, seq_length: int) -> dict[str, StoredTensor]:
    """Where each of a model's `file_tensors` is, by its name there.

    Raises:
        ConfigError: when the folder is not in the format, or holds another model; with every fault.
    """
    with faults_of_files(SETTING, folder):
        root = Path(os.path.expanduser(folder))
        _check_names(root)
        if faults := config_faults(read_json(root / CONFIG), folder, model, seq_length):
            raise ConfigError(faults)
        return _matched(file_tensors(model, seq_length), _stored(root))


@contextmanager
def faults_of_files(setting: str, folder: str) -> Iterator[None]:
    """Inside, what is wrong with the files of a folder becomes a fault of the setting that names it."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        reason = "its JSON is nested too deeply" if isinstance(error, RecursionError) else reason
        raise ConfigError([Fault(setting, folder, reason, _SAVE)]) from error


def _check_names(root: Path) -> None:
    """That the folder has the files of the format, as far as their names show."""
    found = {name for name in (CONFIG, WEIGHTS, INDEX, *_PICKLES) if os.path.isfile(root / name)}
    if CONFIG not in found:
        raise ValueError(f"has no {CONFIG}")
    if not found & {WEIGHTS, INDEX}:
        pickled = f"; {_PICKLES[0]} is not read: a pickle can run any code" if found & {*_PICKLES} else ""
        raise ValueError(f"has no {WEIGHTS}, and no {INDEX}{pickled}")


def _stored(root: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name. As in transformers, an index is not read beside one whole file."""
    if os.path.isfile(root / WEIGHTS):
        return dict(_tensors(root / WEIGHTS))
    where = read_json(root / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{INDEX} has no weight_map")
    for file in where.values():
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise ValueError(f"{INDEX} names {json.dumps(file)[:99]}, which is no safetensors file beside it")
    files = {file: dict(_tensors(root / file)) for file in dict.fromkeys(where.values())}
    for name, file in where.items():
        if name not in files[file]:
            raise ValueError(f"{INDEX} has {name} in {file}, which does not hold it")
    everything = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    return everything | {name: files[file][name] for name, file in where.items()}


def _tensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of one file, from its header: the number of its bytes in 8 bytes, then JSON."""
    if not os.path.isfile(path):
        raise ValueError(f"has no {path.name}")
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > min(num_bytes - 8, _MAX_JSON_BYTES):
            raise ValueError(f"{path.name} is no safetensors file, or not all of one")
        header = _parsed(file.read(length), path.name)
    header.pop("__metadata__", None)
    end = 8 + length
    for name, entry in header.items():
        tensor, size = _tensor(path, name, entry)
        yield name, tensor
        end += size
    if end != num_bytes:
        raise ValueError(f"{path.name} has {num_bytes} bytes, and by its header {end}: it is not whole")


def _tensor(path: Path, name: str, entry: Any) -> tuple[StoredTensor, int]:
    """One entry of a header, and the bytes that its tensor takes."""
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError(f"{path.name} has no shape of {name}")
    if not isinstance(dtype, str) or dtype not in _NUMBER_BYTES:
        known = ", ".join(_NUMBER_BYTES)
        raise ValueError(f"{name} in {path.name} has numbers of type {dtype}; those that are read: {known}")
    stored = StoredTensor(file=path, name=name, shape=tuple(shape))
    return stored, prod(shape) * _NUMBER_BYTES[dtype]


def _matched(wanted: Sequence[FileTensor], stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Where each tensor is, once all are there in their shapes, and no others."""
    found, wrong = {}, []
    for tensor in wanted:
        names = (tensor.name, *(tensor.name.removeprefix(prefix) for prefix in PREFIXES))
        name = next((name for name in names if name in stored), None)
        if name is None:
            wrong.append(f"{tensor.name} is in no file of it")
        elif stored[name].shape != tensor.shape:
            shapes = f"{[*stored[name].shape]}, and by its {CONFIG} {[*tensor.shape]}"
            wrong.append(f"{name} is {shapes}")
        else:
            found[tensor.name] = stored[name]
    used = {tensor.name for tensor in found.values()}
    if not wrong:
        others = (name for name in stored if name not in used and not UNUSED.fullmatch(name))
        wrong = [f"it holds {name}, which a model of its {CONFIG} does not have" for name in others]
    if wrong:
        more = f"; and {len(wrong) - _NUM_SHOWN} more" if len(wrong) > _NUM_SHOWN else ""
        raise ValueError("; ".join(wrong[:_NUM_SHOWN]) + more)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
        OSError: when it cannot be read.
        ValueError: when it holds no such object, or is too large.
    """
    with path.open("rb") as file:
        content = file.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        raise ValueError(f"{path.name} has more than {_MAX_JSON_BYTES} bytes")
    return _parsed(content, path.name)


def _parsed(content: bytes, name: str) -> dict[str, Any]:
    """The JSON object in a file, or in its header."""
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{name} holds no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} holds no JSON object")
    return parsed
