"""A split backward does every product once, each in its own half."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from launcher.contract.plan import Plan
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.model.deferred_weight_gradients import SplitBackward
from launcher.runtime.model.simulated_device import SimulatedLinear
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from tests.helpers.contexts import WHOLE
from tests.helpers.equality import CPU, job
from tests.helpers.objects import substitute
from tests.helpers.ranks import run_ranks

NUM_MICROBATCHES = 8


def products(rank: int, plan: Plan) -> dict[str, list[int]]:
    """Floating-point operations of matrix products in every F, B and W of one step."""
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    counted: dict[str, list[int]] = {"F": [], "B": [], "W": []}

    def counting(kind: str, function: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = function(*arguments, **named)
            counted[kind].append(counter.get_total_flops())
            return result

        return run

    update = trainer.update
    substitute(update, "backward", counting("B", update.backward))
    substitute(update, "backward_weight", counting("W", update.backward_weight))
    for module in trainer.part.modules.values():
        module.forward = counting("F", module.forward)
    trainer.step(0, next(steps))
    return counted


@pytest.mark.parametrize("model", [{"family": "gpt"}, {"family": "llama"}], ids=lambda m: m["family"])
def test_each_product_runs_once_per_microbatch_and_in_its_own_half(model: dict[str, str]) -> None:
    plans = [job(model=model, parallel={"pp": 2, "schedule": name}) for name in ("1f1b", "zb_h1")]
    for whole, split in zip(*(run_ranks(2, products, plan) for plan in plans), strict=True):
        assert [len(whole[kind]) for kind in "FBW"] == [NUM_MICROBATCHES, NUM_MICROBATCHES, 0]
        assert [len(split[kind]) for kind in "FBW"] == [NUM_MICROBATCHES] * 3
        for kinds in (whole, split):
            assert all(len(set(counts)) == 1 for counts in kinds.values() if counts)
        assert split["B"][0] + split["W"][0] == whole["B"][0]
        # A linear costs as much in each of its three products, and no other product is counted: torch
        # has no formula for attention on the CPU, which has no weights anyway.
        assert split["B"][0] == split["W"][0] > 0


def waiting_bytes(rank: int, plan: Plan) -> tuple[int, int]:
    """The most microbatches that wait for their W at once, and the bytes that their products keep."""
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    weights = {p.untyped_storage().data_ptr() for m in trainer.part.modules.values() for p in m.parameters()}
    found: list[tuple[int, int]] = []
    finish = trainer.executor._backward_weight

    def looking(action: Any, step: Any, update: Any, *, last: bool) -> None:
        products = [product for waiting in step.deferred.values() for product in waiting.gradients]
        cells = [cell.cell_contents for product in products for cell in product.compute.__closure__]
        storages = [kept.untyped_storage() for kept in cells if isinstance(kept, torch.Tensor)]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        found.append((len(step.deferred), sum(sizes[place] for place in sizes.keys() - weights)))
        finish(action, step, update, last=last)

    trainer.executor._backward_weight = looking  # type: ignore[method-assign]
    trainer.step(0, next(steps))
    return max(found)


@pytest.mark.parametrize(("family", "recompute"), [("gpt", "none"), ("llama", "full")])
def test_what_waits_for_its_weight_gradients_is_no_more_than_planned(family: str, recompute: str) -> None:
    parallel = {"pp": 2, "schedule": "zb_h1", "recompute": recompute}
    plan = job(model={"family": family, "hidden_size": 64}, parallel=parallel)
    num_waiting, found = run_ranks(2, waiting_bytes, plan)[-1]
    assert num_waiting == plan.memory[-1].peak_microbatches == 2
    assert 0.7 < found / plan.memory[-1].activations_bytes <= 1


def test_a_linear_gives_the_gradients_of_torchs() -> None:
    torch.manual_seed(0)
    weight, bias, x = (
        nn.Parameter(torch.randn(3, 4)),
        torch.randn(3),
        torch.randn(2, 5, 4, requires_grad=True),
    )
    deferral = SplitBackward(is_enabled=True)
    expected = torch.autograd.grad(functional.linear(x, weight, bias).square().sum(), (x, weight))
    out = deferral.linear(x, weight, bias).square().sum()
    with deferral.collecting() as put_off:
        out.backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, expected[0])
    (product,) = put_off
    assert product.weight is weight
    torch.testing.assert_close(product.compute(), expected[1])


def test_a_frozen_weight_puts_nothing_off() -> None:
    deferral, frozen = SplitBackward(is_enabled=True), nn.Parameter(torch.ones(2, 2), requires_grad=False)
    x = torch.ones(1, 1, 2, requires_grad=True)
    out = deferral.linear(x, frozen).sum()
    with deferral.collecting() as put_off:
        out.backward()
    assert put_off == []
    assert x.grad is not None


def test_the_gradient_of_a_weight_that_is_computed_from_a_parameter_reaches_the_parameter() -> None:
    deferral, weight = SplitBackward(is_enabled=True), nn.Parameter(torch.randn(2, 3))
    mask, x = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]), torch.randn(4, 3)
    (expected,) = torch.autograd.grad(functional.linear(x, weight * mask).square().sum(), weight)
    out = deferral.linear(x, weight * mask).square().sum()
    with deferral.collecting() as put_off:
        out.backward()
    assert put_off == []
    torch.testing.assert_close(weight.grad, expected)


def test_outside_of_a_split_schedule_the_backward_is_whole() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with WHOLE.collecting() as put_off:
        WHOLE.linear(torch.ones(1, 1, 2), weight).sum().backward()
    assert put_off == []
    assert weight.grad is not None


def test_a_weight_that_is_not_trained_has_nothing_to_defer() -> None:
    layer, deferral = (
        SimulatedLinear(4, flops_per_s=1e12).requires_grad_(False),
        SplitBackward(is_enabled=True),
    )
    layer.split_with(deferral)
    x = torch.ones(2, 4, requires_grad=True)
    with deferral.collecting() as deferred:
        layer(x).sum().backward()
    assert (deferred, layer.weight.grad, x.grad is None) == ([], None, False)
