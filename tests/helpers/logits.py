"""The logits of a model that is whole on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from launcher.contract.plan import Plan
from launcher.runtime.checkpoint.saving import restore
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer, _load_initial
from tests.helpers.equality import CPU
from tests.helpers.objects import inside


def tokens_and_logits(rank: int, plan: Plan, root: Path | None = None) -> tuple[Tensor, Tensor]:
    """Of the first microbatch, with the weights of a checkpoint, or of train.init_from."""
    ctx = make_context(plan.rank(rank), CPU)
    trainer = Trainer(ctx)
    restore(trainer.ctx, trainer.update, root) if root else _load_initial(trainer)
    batch, (module,) = next(Loader(ctx).steps(0))[0], trainer.part.modules.values()
    stage = inside(module)
    with torch.no_grad():
        hidden = stage.prologue(batch)
        for block in stage.blocks:
            hidden = block(hidden, *block.seeds(batch))
        return batch.inputs, stage.epilogue.norm(hidden) @ stage.epilogue.head.weight.T


def logits_of_all(rank: int, plans: Sequence[Plan]) -> list[tuple[Tensor, Tensor]]:
    """`tokens_and_logits` of several models that begin with train.init_from."""
    return [tokens_and_logits(rank, plan) for plan in plans]
