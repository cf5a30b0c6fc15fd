"""Whether a ``config.json`` describes the model of a recipe, setting by setting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.base.errors import Fault
from launcher.contract.config import ModelConfig
from launcher.contract.model.config_json import effective
from launcher.contract.model.config_reading import Described, described, without_defaults
from launcher.contract.model.sizes import Sizes, biting
from launcher.typed.read import plain

SETTING = "train.init_from"
"""Where a recipe names the folder."""


def config_faults(found: Mapping[str, Any], folder: str, model: ModelConfig, seq_length: int) -> list[Fault]:
    """Where a folder's ``config.json`` describes another model than the recipe, or one that is not built
    here. ``model``: of the family gpt or llama."""
    theirs = described(found, SETTING, folder)
    if isinstance(theirs, Fault):
        return [theirs]
    if theirs.format.family != model.family:
        rule, family = f"{SETTING} holds a model of type {theirs.format.model_type}", theirs.format.family
        return [Fault("model.family", model.family, rule, ways=({"model.family": family},))]
    return [*_differing(theirs, model, Sizes.of(model, seq_length)), *theirs.faults]


def length_fault(theirs: Described, seq_length: int) -> Iterator[Fault]:
    """Samples that are longer than the longest context."""
    if theirs.length is not None and theirs.length < seq_length:
        where = theirs.entry("max_position_embeddings")
        yield other_fault("batch.seq_length", seq_length, theirs.length, where, theirs.setting)


def _differing(theirs: Described, model: ModelConfig, sizes: Sizes) -> Iterator[Fault]:
    """Settings that are not those of the file's model."""
    is_short = [*length_fault(theirs, sizes.seq_length)]
    ours = without_defaults(effective(model, sizes))
    ours["max_position_embeddings"] = sizes.positions
    for name, value in theirs.settings.items():
        given = model.max_position_embeddings if name == "max_position_embeddings" else ours[name]
        if name == "rope_scaling":
            yield from _scaling_fault(theirs, model)
        elif name == "sliding_window":
            if sizes.window != biting(value, sizes.seq_length):
                yield other_fault(f"model.{name}", given, value, theirs.entry(name), SETTING)
        elif value != ours[name] and not (name == "max_position_embeddings" and (is_short or value is None)):
            yield other_fault(f"model.{name}", given, value, theirs.entry(name), SETTING)
    yield from is_short


def _scaling_fault(theirs: Described, model: ModelConfig) -> Iterator[Fault]:
    ours, scaling = plain(model.rope_scaling), theirs.settings["rope_scaling"]
    if scaling != ours:
        what = "another" if scaling else "none"
        rule = f"{SETTING} holds a model with {what}{theirs.entry('rope_scaling')}"
        yield Fault("model.rope_scaling", ours, rule, ways=({"model.rope_scaling": scaling},))


def other_fault(path: str, given: Any, value: Any, where: str, setting: str) -> Fault:
    """A setting that is not that of the file's model."""
    rule = f"{setting} holds a model with {json.dumps(value)}{where}"
    return Fault(path, given, rule, ways=({path: value},))
