"""The logits of a model under any layout."""

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
from tests.helpers.ranks import run_ranks


def tokens_and_logits(rank: int, plan: Plan, root: Path | None = None) -> tuple[Tensor, Tensor]:
    """Of the first microbatch of a model that is whole on one rank, with the weights of a checkpoint, or of
    train.init_from."""
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


def tokens_and_logits_of_a_step(plans: Sequence[Plan]) -> list[tuple[Tensor, Tensor]]:
    """Of all samples of the first step under plans of one size and without replicas, as their ranks compute
    them with the weights of train.init_from."""
    ranks = run_ranks(plans[0].world_size, _heard_by_each, plans)
    found = []
    for plan, results in zip(plans, zip(*ranks, strict=True), strict=True):
        parts = [logits for _, logits in results if logits is not None]
        found.append((results[0][0], torch.cat(parts, -1)[..., : plan.config.model.vocab_size]))
    return found


def _heard_by_each(rank: int, plans: Sequence[Plan]) -> list[tuple[Tensor, Tensor | None]]:
    return [_heard_at_the_head(rank, plan) for plan in plans]


def _heard_at_the_head(rank: int, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """The tokens of a step, where this rank has the embedding; and where it has the head, the logits of its
    part of the vocabulary."""
    ctx = make_context(plan.rank(rank), CPU)
    trainer, heard = Trainer(ctx), list[Tensor]()
    _load_initial(trainer)
    for module in trainer.part.modules.values():
        if (epilogue := inside(module).epilogue) is not None:
            epilogue.head.register_forward_pre_hook(
                lambda head, given: heard.append((given[0] @ head.weight.T).detach().clone())
            )
    batches = next(Loader(ctx).steps(0))
    trainer.step(0, batches)
    return torch.cat([batch.inputs for batch in batches]), torch.cat(heard) if heard else None
