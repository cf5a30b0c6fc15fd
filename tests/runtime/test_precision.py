"""Mixed precision: close to fp32, and an overflow costs a step, not the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.contract.plan import Plan
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context, set_tf32
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import CPU, Trained, job, train
from tests.helpers.objects import inside
from tests.helpers.ranks import RankError, run_ranks

BF16 = {"name": "bf16", "compute": "bf16"}
FP16 = {"name": "fp16", "compute": "fp16"}
PEAKS = {"peak_flops": {"fp32": 1e9, "bf16": 1e9, "fp16": 1e9}}


def mixed(precision: dict[str, str], **parallel: int) -> Plan:
    return job(precision=precision, device=PEAKS, parallel=parallel)


def assert_close_losses(found: Trained, expected: Trained, tolerance: float) -> None:
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected.losses), rtol=tolerance, atol=0
    )


@pytest.mark.parametrize("precision", [BF16, FP16], ids=lambda p: p["name"])
@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"pp": 2}, {"tp": 2}], ids=str)
def test_mixed_precision_stays_near_fp32(precision: dict[str, str], layout: dict[str, int]) -> None:
    assert_close_losses(train(mixed(precision, **layout)), train(job()), tolerance=5e-3)


NEAR_SGD = {"eps": 1.0, "clip_norm": None, "warmup_steps": 0}
"""With such an eps AdamW takes steps in proportion to the gradient, so its scale shows."""


@pytest.mark.parametrize(
    "precision",
    [FP16, BF16 | {"master_weights": False}, FP16 | {"gradients": "fp16"}],
    ids=["fp16", "bf16 without masters", "fp16 gradients"],
)
def test_norms_and_steps_are_those_of_fp32(precision: dict[str, Any]) -> None:
    expected = train(job(optim=NEAR_SGD))
    found = train(job(optim=NEAR_SGD, precision=precision, device=PEAKS), start_at_a_scale_of_16)
    torch.testing.assert_close(torch.tensor(found.norms), torch.tensor(expected.norms), rtol=2e-2, atol=0)
    moved = {name: found.weights[name] - weight for name, weight in expected.weights.items()}
    if precision.get("master_weights", True):  # else small steps round to nothing
        assert max(float(error.abs().max()) for error in moved.values()) < 2e-3


def start_at_a_scale_of_16(trainer: Trainer, loader: Loader) -> None:
    if inside(trainer.update)._scale is not None:
        inside(trainer.update)._scale.value = 16.0  # fp16 gradients themselves must not overflow


def overflow_once(rank: int, plan: Plan) -> list[tuple[bool, float, bool]]:
    """Per step: skipped, loss scale after it, and whether the weights moved."""
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    if inside(trainer.update)._scale is not None:
        inside(trainer.update)._scale.value = 2.0**40
    seen = []
    for step in range(2):
        before = [param.clone() for param in inside(trainer.update)._masters]
        done = trainer.step(step, next(steps))
        moved = any(
            not torch.equal(a, b) for a, b in zip(before, inside(trainer.update)._masters, strict=True)
        )
        seen.append((done.outcome.is_skipped, trainer.update.loss_scale, moved))
        if inside(trainer.update)._scale is not None:
            inside(trainer.update)._scale.value = 2.0**10
    return seen


def test_an_overflow_skips_the_step_on_every_rank_and_halves_the_scale() -> None:
    plan = mixed(FP16, pp=2, dp=2)
    for seen in run_ranks(4, overflow_once, plan):
        assert seen[0] == (True, 2.0**39, False)
        assert seen[1] == (False, 2.0**10, True)


def infinite_loss(rank: int, plan: Plan) -> None:
    ctx = make_context(plan.rank(rank), CPU)
    trainer = Trainer(ctx)
    with torch.no_grad():
        next(iter(inside(trainer.update)._masters)).fill_(torch.nan)
    trainer.step(0, next(Loader(ctx).steps(0)))


def test_without_a_loss_scale_a_gradient_that_is_not_finite_ends_the_run() -> None:
    with pytest.raises(RankError, match=r"gradient of step 1 is not finite \(nan\); try a smaller optim\.lr"):
        run_ranks(1, infinite_loss, job())


def test_tf32_is_what_the_plan_says_for_products_and_convolutions() -> None:
    """torch itself allows it to convolutions unasked."""

    def allowed(rank: int, is_allowed: bool) -> tuple[bool, bool]:
        set_tf32(is_allowed=is_allowed)
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    assert run_ranks(1, allowed, True) == [(True, True)]
    assert run_ranks(1, allowed, False) == [(False, False)]
