"""The state that a training begins with where it does not resume: none, weights, or a checkpoint's all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from launcher.base.errors import JobError
from launcher.base.files import write_whole
from launcher.contract.config import TrainConfig
from launcher.contract.model.checkpoint import SourceCheckpoint, first_step, source_checkpoint
from launcher.contract.model.config_json import ORIGINAL
from launcher.contract.model.formats import CONFIG
from launcher.runtime.api import FragmentReader, RankContext
from launcher.runtime.checkpoint.fragments import state_name
from launcher.runtime.checkpoint.store import DAMAGE, Checkpoint
from launcher.runtime.model.pretrained import Pretrained, without_history
from launcher.runtime.process.log import log


def initial_state(ctx: RankContext) -> FragmentReader | None:
    """What reads the state after the first `first_step` steps; None: the model is as it was built.

    Raises:
        JobError: when the checkpoint that it begins with is gone, or damaged.
        ConfigError: when the folder of weights holds another model.
    """
    plan = ctx.plan.plan
    train = plan.config.train
    if train.init_from is None:
        return None
    source = source_checkpoint(train)
    if source is None:
        return Pretrained(train.init_from, plan.config.model, plan.batch.seq_length).read
    checkpoint = _opened(source)
    what = "weights and optimizer" if train.init_optimizer else "the weights"
    log(f"begins with {what} of {source.run_dir} after step {source.step}")
    if first_step(train):
        ctx.sample_order = checkpoint.sample_order
        return checkpoint.read

    def read(name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        is_weight = name.startswith(state_name("weight", ""))
        return checkpoint.read(name, offset, shape) if is_weight else without_history(name, shape)

    return read


def keep_initial_config(train: TrainConfig, run_dir: Path) -> None:
    """Keeps the config.json of pretrained weights, also of those that another run began with: an export takes
    from it what training does not change."""
    if train.init_from is None:
        return
    source = source_checkpoint(train)
    original = source.run_dir / ORIGINAL if source else Path(os.path.expanduser(train.init_from)) / CONFIG
    if source is None or original.is_file():
        write_whole(run_dir / ORIGINAL, original.read_text(encoding="utf-8"))


def _opened(source: SourceCheckpoint) -> Checkpoint:
    try:
        return Checkpoint(source.folder)
    except FileNotFoundError:
        raise JobError(
            f"train.init_from={source.folder} is no longer there: its run keeps its newest checkpoints, "
            "and those of train.keep_every. Begin with one that is kept."
        ) from None
    except DAMAGE as error:
        raise JobError(f"train.init_from={source.folder} is damaged: {error}") from None
