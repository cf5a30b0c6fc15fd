"""A checkpoint of another run as the beginning of this one: where it is, and whether its model is ours.

``train.init_from`` names its folder, ``RUN/checkpoints/step-00000040``: such a name is a checkpoint wherever
it is read, and any other one is a folder in Hugging Face's format. A checkpoint is only read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.base.errors import Fault
from launcher.base.files import read_json
from launcher.contract.config import LaunchConfig, ModelConfig, TrainConfig
from launcher.contract.job import CHECKPOINTS, checkpoint_name
from launcher.contract.model.config_faults import SETTING
from launcher.contract.model.parameters import parameters_of
from launcher.contract.model.sizes import Sizes
from launcher.contract.moved import with_current_names
from launcher.contract.optim.config import OptimConfig
from launcher.contract.optim.plugin import optimizer_of
from launcher.typed.read import Reading, plain, read

MARKER = "complete.json"
"""In the folder of a checkpoint that is complete."""
_FOLDER = re.compile(rf"(?:.*/)?{CHECKPOINTS}/step-(\d{{8,}})")
_SIZES = {
    "num_layers": "num_layers",
    "hidden": "hidden_size",
    "num_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "head": "head_dim",
    "ffn": "ffn_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
}
"""The settings of a transformer that its tensors follow from, by the size that each resolves to."""
_OF_LLAMA = ("rope_theta", "rope_scaling", "sliding_window")
"""Settings of a Llama that change what it computes, and of no tensor the shape."""


@dataclass(frozen=True, kw_only=True)
class SourceCheckpoint:
    """A checkpoint that another run begins with."""

    folder: Path
    step: int
    """Steps that its run had done."""

    @property
    def run_dir(self) -> Path:
        """The directory of its run."""
        return self.folder.parent.parent

    @property
    def is_complete(self) -> bool:
        """Whether it is there, whole as far as its marker tells."""
        return os.path.isfile(self.folder / MARKER)


def source_checkpoint(train: TrainConfig) -> SourceCheckpoint | None:
    """The checkpoint that a training begins with, by the name of its folder; None: it begins with none."""
    folder = os.path.normpath(os.path.expanduser(train.init_from or ""))
    match = _FOLDER.fullmatch(folder)
    return SourceCheckpoint(folder=Path(folder), step=int(match[1])) if match else None


def first_step(train: TrainConfig) -> int:
    """Steps that are done when a training begins: those of the checkpoint whose optimizer it takes over."""
    source = source_checkpoint(train) if train.init_optimizer else None
    return source.step if source else 0


def baseline_end(config: LaunchConfig) -> int:
    """Steps that are done when the baseline of a training ends, where the training is that long."""
    return first_step(config.train) + config.report.num_baseline_steps


def complete_steps(run_dir: Path) -> list[int]:
    """The steps after which a run has a complete checkpoint, ascending; one being written is none."""
    markers = (run_dir / CHECKPOINTS).glob(f"step-*/{MARKER}")
    steps = (path.parent.name.removeprefix("step-") for path in markers)
    return sorted(int(step) for step in steps if step.isdecimal())


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """The folder of a run's checkpoint."""
    return run_dir / CHECKPOINTS / checkpoint_name(step)


def checkpoint_faults(config: LaunchConfig, num_parameters: int, *, is_needed: bool = True) -> list[Fault]:
    """What is wrong with the checkpoint that a training begins with; none where it begins with none.

    ``num_parameters``: of the planned model. ``is_needed``: whether it is a fault that it is not on this
    machine.
    """
    source = source_checkpoint(config.train)
    if source is None or not (is_needed or os.path.isdir(source.run_dir)):
        return []
    given = config.train.init_from
    if not source.is_complete:
        steps = ", ".join(map(str, complete_steps(source.run_dir)))
        fix = f"Those that its run has are after step {steps}." if steps else "Its run has none."
        return [Fault(SETTING, given, "is no complete checkpoint", fix)]
    plan = _plan_of(source)
    model = _model_in(plan)
    try:
        stored = plan["config"]
        seq_length, stored_parameters = int(stored["batch"]["seq_length"]), int(plan.get("num_parameters", 0))
    except (LookupError, TypeError, ValueError):
        model = None
    if model is None:
        rule = "is of a run whose plan.json is missing or damaged, so that its model is not known"
        return [Fault(SETTING, given, rule, "Give a checkpoint inside the directory of its run.")]
    optimizer = list(_optimizer_faults(config, stored.get("optim", {}).get("name")))
    if model.family != config.model.family:
        return [*optimizer, _other("family", config.model.family, model.family)]
    if model.family == "custom":
        return [*optimizer, *_own_model_faults(config.model, model, num_parameters, stored_parameters)]
    faults = [*optimizer, *_size_faults(config, model, seq_length)]
    return faults or [*_state_faults(config, stored["optim"])]


def checkpoint_notes(config: LaunchConfig) -> Iterator[str]:
    """What the model of a training computes otherwise than that of the checkpoint which it begins with, where
    no tensor tells. It may be meant, as a longer context."""
    source = source_checkpoint(config.train)
    theirs = _model_in(_plan_of(source)) if source else None
    if theirs is None or theirs.family != config.model.family:
        return
    for setting in ("norm_eps", *(_OF_LLAMA if theirs.family == "llama" else ())):
        ours, before = getattr(config.model, setting), getattr(theirs, setting)
        if ours != before:
            was, is_now = (json.dumps(plain(value)) for value in (before, ours))
            yield f"The weights were trained with model.{setting}={was}, and go on with {is_now}."


def _plan_of(source: SourceCheckpoint) -> dict[str, Any]:
    """The stored plan of the run that a checkpoint is of; empty where there is none that can be read."""
    plan: dict[str, Any] = with_current_names(read_json(source.run_dir / "plan.json"))
    return plan


def _model_in(plan: dict[str, Any]) -> ModelConfig | None:
    """The model of a stored plan; None where it says none."""
    with suppress(LookupError, TypeError, ValueError):
        return read(ModelConfig, plan["config"]["model"], Reading())
    return None


def _optimizer_faults(config: LaunchConfig, stored: str | None) -> Iterator[Fault]:
    """The state of another optimizer cannot be taken over."""
    if config.train.init_optimizer and stored != config.optim.name:
        rule = f"train.init_optimizer takes over the state of {stored}, which {SETTING} was trained with"
        yield Fault("optim.name", config.optim.name, rule, ways=({"train.init_optimizer": False},))


def _state_faults(config: LaunchConfig, stored: Any) -> Iterator[Fault]:
    """The same optimizer may have kept less, as of what was frozen. ``stored``: its settings of that time."""
    theirs = read(OptimConfig, stored, Reading()) if config.train.init_optimizer else None
    if theirs is None:
        return
    optimizer, before = optimizer_of(config), replace(config, optim=theirs)
    for each in parameters_of(config.model, config.batch.seq_length):
        missing = [*optimizer.states(each, config)]
        if not theirs.is_frozen(each.name):
            missing = [kind for kind in missing if kind not in optimizer.states(each, before)]
        if missing and not config.optim.is_frozen(each.name):
            rule = f"{SETTING} has no {missing[0]} of {each.name}, as its run had other settings in optim"
            fix = "Set train.init_optimizer=false, or take the settings of that run."
            yield Fault("train.init_optimizer", True, rule, fix, ways=({"train.init_optimizer": False},))
            return


def _size_faults(config: LaunchConfig, model: ModelConfig, seq_length: int) -> Iterator[Fault]:
    """Settings under which the tensors have other shapes or names. ``model``: the stored one."""
    ours, theirs = Sizes.of(config.model, config.batch.seq_length), Sizes.of(model, seq_length)
    for size, setting in _SIZES.items():
        values = getattr(config.model, setting), getattr(model, setting)
        follows_from_others = values == (None, None) and size != "positions"
        if size == "positions" and model.family != "gpt":
            continue
        if getattr(ours, size) != getattr(theirs, size) and not follows_from_others:
            yield _other(setting, values[0], getattr(theirs, size))
    for setting in ("tied_embeddings", "attention_bias", "qk_norm"):
        values = getattr(config.model, setting), getattr(model, setting)
        if values[0] != values[1]:
            yield _other(setting, *values)


def _own_model_faults(
    ours: ModelConfig, theirs: ModelConfig, num_parameters: int, stored_parameters: int
) -> Iterator[Fault]:
    """Layers of a user's own that are not those of the checkpoint. Their names are compared by the ranks."""
    if ours.target != theirs.target:
        yield _other("target", ours.target, theirs.target)
    elif num_parameters != stored_parameters:
        rule = f"builds {num_parameters} parameters, and {SETTING} holds a model with {stored_parameters}"
        yield Fault("model.target", ours.target, rule, "Build the model that was trained there.")


def _other(setting: str, ours: Any, theirs: Any) -> Fault:
    rule = f"{SETTING} holds a model with {theirs}"
    return Fault(f"model.{setting}", ours, rule, ways=({f"model.{setting}": theirs},))
