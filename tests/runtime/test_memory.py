"""What is held, measured from live storages, is what the plan says: at every ZeRO stage, in both formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import CPU, job
from ranks import run_ranks

from launcher.plan.model import Plan
from launcher.runtime.data import Loader
from launcher.runtime.loop import Trainer
from launcher.runtime.memory import MemoryGauge, live_bytes, peak_resident_bytes, resident_bytes
from launcher.runtime.rank import make_context

MODEL = {"num_layers": 4, "hidden_size": 64}
"""217 thousand parameters: what is not a state is small beside them."""
BF16 = {
    "precision": {"name": "bf16", "compute": "bf16", "master_weights": True},
    "device": {"peak_flops": {"fp32": 1e9, "bf16": 1e9}},
}
MEGABYTE = 1 << 20


def measured_states(rank: int, plan: Plan) -> int:
    before = live_bytes(CPU)
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    for step in range(2):
        trainer.step(step, next(steps))
    found = trainer.memory.record(2)
    assert found is not None
    return found.states_bytes - before


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_that_are_held_are_those_of_the_plan(stage: int, sections: dict[str, Any]) -> None:
    plan = job(model=MODEL, parallel={"dp": 2, "zero_stage": stage}, **sections)
    (planned,) = plan.memory
    predicted = planned.weights_bytes + planned.gradients_bytes + planned.optimizer_bytes
    assert predicted == planned.states_by_zero_stage[stage]
    for found in run_ranks(2, measured_states, plan):
        assert found == pytest.approx(predicted, rel=0.02)


def test_a_storage_that_several_tensors_share_counts_once() -> None:
    before = live_bytes(CPU)
    whole = torch.zeros(MEGABYTE)
    parts = [whole[:10], whole.view(-1, 2)]
    assert live_bytes(CPU) - before == 4 * MEGABYTE
    del whole, parts
    assert live_bytes(CPU) == before


def test_a_gradient_that_only_autograd_holds_counts() -> None:
    before = live_bytes(CPU)
    weight = torch.zeros(MEGABYTE, requires_grad=True)
    (weight * 2).sum().backward()
    assert live_bytes(CPU) - before == 8 * MEGABYTE


def test_the_peak_is_what_was_resident_though_it_is_gone() -> None:
    def peak(rank: int) -> tuple[int, int]:
        gauge, now = MemoryGauge(CPU), resident_bytes()
        gauge.look()
        assert gauge.record(1) is None, "one step says nothing of the optimizer"
        gauge.look()
        size = peak_resident_bytes() - now + 512 * MEGABYTE
        torch.ones(size, dtype=torch.uint8)
        found = gauge.record(2)
        assert found is not None
        return found.peak_bytes, size

    ((found, size),) = run_ranks(1, peak)
    slack = 64 * MEGABYTE  # a forked process maps the pages of its libraries as it comes to use them
    assert size - slack < found < size + slack
