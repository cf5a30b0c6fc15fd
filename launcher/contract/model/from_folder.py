"""The model of a recipe whose sizes are those of a folder in Hugging Face's format (``model.path``)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.base.errors import ConfigError, Fault
from launcher.contract.config import ModelConfig
from launcher.contract.model.config_faults import length_fault, other_fault
from launcher.contract.model.config_json import effective
from launcher.contract.model.config_reading import Described, described
from launcher.contract.model.folder import faults_of_files, read_json
from launcher.contract.model.formats import CONFIG
from launcher.contract.model.sizes import Sizes
from launcher.typed.read import Reading, plain, read

SETTING = "model.path"
"""Where a recipe names the folder."""


def settled(model: ModelConfig, seq_length: int, given: Collection[str] = ()) -> ModelConfig:
    """The model with what the ``config.json`` of its folder says, and without the folder, from which nothing
    else is read. As it is where it names none.

    ``given``: paths of the settings that the recipe gives itself, which must be the folder's.

    Raises:
        ConfigError: when the folder holds no such file, or what it says is not built here; with every fault.
    """
    if model.path is None or model.family == "custom":
        return model
    with faults_of_files(SETTING, model.path):
        theirs = described(read_json(Path(os.path.expanduser(model.path)) / CONFIG), SETTING, model.path)
    if isinstance(theirs, Fault):
        raise ConfigError([theirs])
    faults = [*theirs.faults, *length_fault(theirs, seq_length)]
    own: dict[str, Any] = {"path": None, "family": theirs.format.family}
    if "model.name" not in given:
        own["name"] = os.path.basename(os.path.abspath(os.path.expanduser(model.path)))
    reading = Reading()
    made = read(ModelConfig, plain(model) | theirs.settings | own, reading)
    for fault in reading.faults:
        found = f"makes model.{fault.path}={fault.given}{theirs.entry(fault.path)}"
        faults.append(Fault(SETTING, model.path, f"{found}: {fault.allowed}"))
    if made is not None and not theirs.faults:
        faults += _given_faults(model, made, theirs, seq_length, given)
    if faults or made is None:
        raise ConfigError(faults)
    return made


def _given_faults(
    model: ModelConfig, made: ModelConfig, theirs: Described, seq_length: int, given: Collection[str]
) -> Iterator[Fault]:
    """Settings that a recipe gives beside the folder, and that are not the folder's."""
    same: Mapping[str, Any] = plain(made) | effective(made, Sizes.of(made, seq_length))
    ours, values = plain(model), plain(made)
    for name in ("family", *theirs.settings):
        path = f"model.{name}"
        is_given = any(one == path or one.startswith(f"{path}.") for one in given)
        if is_given and ours[name] not in (values[name], same[name]):
            yield other_fault(path, ours[name], values[name], theirs.entry(name), SETTING)
