"""A run that is cut in two halves by a checkpoint, and the same run in one go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from launcher.contract.plan import Plan
from launcher.runtime.checkpoint.saving import Saver, restore
from launcher.runtime.data.microbatches import Loader, Microbatch
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import CPU

HALF, STEPS = 2, 4
MODEL = {"vocab_size": 257, "dropout": 0.1}


def save(trainer: Trainer, root: Path, step: int) -> None:
    """Writes a checkpoint after ``step`` steps and waits for it. Collective over all ranks."""
    saver = Saver(trainer.ctx, trainer.update, root)
    saver.save(step)
    saver.wait()
    dist.barrier()


def first_half(rank: int, plan: Plan, root: Path) -> list[float | None]:
    """Half of the steps, and a checkpoint."""
    trainer, steps = started(rank, plan)
    losses = [trainer.step(step, next(steps)).loss for step in range(HALF)]
    save(trainer, root, HALF)
    return losses


def second_half(rank: int, plan: Plan, root: Path, restart_from_zero: bool = False) -> list[float | None]:
    """The other half from the checkpoint; ``restart_from_zero``: with the data of the first."""
    ctx = make_context(plan.rank(rank), CPU)
    trainer = Trainer(ctx)
    first_step = restore(trainer.ctx, trainer.update, root)
    steps = Loader(ctx).steps(0 if restart_from_zero else first_step, ctx.sample_order)
    return [trainer.step(step, next(steps)).loss for step in range(first_step, STEPS)]


def uninterrupted(rank: int, plan: Plan) -> list[float | None]:
    """All steps at once."""
    trainer, steps = started(rank, plan)
    return [trainer.step(step, next(steps)).loss for step in range(STEPS)]


def started(rank: int, plan: Plan) -> tuple[Trainer, Iterator[list[Microbatch]]]:
    """A trainer and its data from the first step on."""
    ctx = make_context(plan.rank(rank), CPU)
    return Trainer(ctx), Loader(ctx).steps(0)


def losses_of(results: list[list[float | None]]) -> list[float]:
    """The losses of the steps, from whichever rank knows them."""
    return [loss for loss in next(r for r in reversed(results) if r[0] is not None) if loss is not None]
