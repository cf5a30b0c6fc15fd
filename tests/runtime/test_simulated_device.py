"""The model of a known device computes what a linear layer does, and takes the time that it is told."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from launcher.base.registry import resolve
from launcher.config.load import load
from launcher.contract.config import ModelConfig
from launcher.contract.model.shape import ModelShape
from launcher.contract.moved import upgraded
from launcher.contract.plan import Plan
from launcher.plan import build as planner
from launcher.plan.checked_job import PlanInputs
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.measure.memory import SavedBytes
from launcher.runtime.model.deferred_weight_gradients import SplitBackward
from launcher.runtime.model.measure_shape import describe
from launcher.runtime.model.simulated_device import Points, SimulatedLinear, build
from launcher.runtime.train.loop import Trainer
from tests.helpers.configs import compose_sound
from tests.helpers.equality import Trained, assert_equal, train
from tests.helpers.objects import substitute

WORDS = ("~sweep", "model.options.flops_per_s=1e12", "model.options.num_layers=4", "data.prefetch_batches=0")


def plan(*words: str) -> Plan:
    composed = compose_sound("pipeline_claims", [*WORDS, "report.claims=false", *words])
    config = load(composed.values, composed.sources)
    return planner.build(config, inputs=PlanInputs(shape=shape(config.model)))


def shape(model: ModelConfig) -> ModelShape:
    return describe(model, Points()[0][0][None])


@cache
def one_device() -> Trained:
    return train(plan("parallel.pp=1"))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_pipeline_of_it_computes_what_one_device_computes(schedule: str) -> None:
    assert_equal(train(plan("parallel.pp=2", f"parallel.schedule={schedule}")), one_device())


def test_a_weight_gradient_that_is_never_taken_up_changes_what_is_computed() -> None:
    def sabotage(trainer: Trainer, loader: Loader) -> None:
        finish = trainer.update.backward_weight
        shortened = lambda products, **named: finish(products[1:], **named)  # noqa: E731
        substitute(trainer.update, "backward_weight", shortened)

    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_equal(train(plan("parallel.pp=2", "parallel.schedule=zb_h1"), sabotage), one_device())


def test_it_computes_a_rectified_product_and_its_gradients() -> None:
    layer, hidden = SimulatedLinear(4, flops_per_s=1e12), torch.randn(2, 3, 4, requires_grad=True)
    expected = functional.linear(hidden, layer.weight).relu().square().sum()
    grads = torch.autograd.grad(expected, (hidden, layer.weight))
    found = layer(hidden).square().sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, layer.weight)), grads)


def test_the_backward_takes_twice_the_time_of_its_operations() -> None:
    layer, hidden = SimulatedLinear(4, flops_per_s=2 * 2 * 4 * 4 / 0.02), torch.randn(2, 4)
    start = time.perf_counter()
    out = layer(hidden)
    middle = time.perf_counter()
    out.sum().backward()
    assert middle - start >= 0.02
    assert time.perf_counter() - middle >= 0.04


def test_its_weight_gradient_can_be_put_off() -> None:
    layer, deferral = SimulatedLinear(4, flops_per_s=1e12), SplitBackward(is_enabled=True)
    layer.split_with(deferral)
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    expected = functional.linear(hidden, layer.weight).relu().sum()
    grads = torch.autograd.grad(expected, (hidden, layer.weight))
    out = layer(hidden).sum()
    with deferral.collecting() as put_off, FlopCounterMode(display=False) as counter:
        out.backward()
    assert counter.get_total_flops() == 2 * 6 * 4 * 4
    assert layer.weight.grad is None
    torch.testing.assert_close(hidden.grad, grads[0])
    torch.testing.assert_close(put_off[0].compute(), grads[1])


def test_it_keeps_as_much_as_it_is_told_and_two_tensors_until_its_weight_gradient() -> None:
    deferral = SplitBackward(is_enabled=True)
    layer, hidden = SimulatedLinear(4, flops_per_s=1e12, num_kept=5), torch.randn(2, 4, requires_grad=True)
    layer.split_with(deferral)
    with SavedBytes([layer.weight], deferral) as held:
        out = layer(hidden).sum()
        assert held.now == (1 + 5) * 32
        with deferral.collecting() as put_off:
            out.backward()
        assert held.now == 2 * 32
        put_off.clear()
    assert (held.now, held.total) == (0, 6 * 32)


def test_its_data_goes_through_its_layers() -> None:
    model, (point, target) = build(num_layers=2, width=8, flops_per_s=1e12), Points(width=8, rows=4)[3]
    out = point[None]
    for layer in model.layers:
        out = layer(out)
    assert model.loss(out, target[None]).shape == ()


@pytest.mark.parametrize("module", ["launcher.runtime.slow_device", "launcher.runtime.model.slow_device"])
def test_a_stored_plan_that_names_the_module_by_an_earlier_name_is_read(module: str) -> None:
    plan = upgraded({"config": {"model": {"target": f"{module}:build"}}})
    assert resolve(plan["config"]["model"]["target"]) is build
