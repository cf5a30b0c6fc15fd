"""Groups of parameters have learning rates and decays of their own, the same under every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.contract.optim.config import GroupConfig
from launcher.contract.plan import Plan
from launcher.runtime.api import slice_of
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.model.build import build_chunks
from launcher.runtime.train.loop import Trainer
from launcher.runtime.train.optimizer import LR_FACTOR, make_optimizer
from tests.helpers.contexts import make_context
from tests.helpers.equality import Trained, assert_equal, job, train, train_each
from tests.helpers.halves import first_half, losses_of, second_half, uninterrupted
from tests.helpers.objects import inside
from tests.helpers.ranks import run_ranks
from tests.helpers.servers import serve_and_train, servers_job

STILL = 1e-30
"""A factor under which weights stay as they are."""
GROUPS = {
    "attention": GroupConfig(names=("layers.*.attention.*",), lr_factor=3.0, weight_decay=0.7),
    "norms": GroupConfig(names=("*norm.weight", "*norm.bias"), weight_decay=0.5),
    "ends": GroupConfig(names=("embedding.weight", "positions.weight"), lr_factor=STILL),
}


def planned(parallel: dict[str, Any] | None = None, optim: dict[str, Any] | None = None) -> Plan:
    return job(parallel=parallel or {}, optim={"groups": GROUPS} | (optim or {}))


@cache
def alone(name: str = "adamw") -> Trained:
    return train(planned(optim={} if name == "adamw" else {"name": name}))


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "interleaved": {"pp": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"},
    "zero 1": {"dp": 2, "zero_stage": 1},
    "zero 3": {"dp": 2, "zero_stage": 3},
}


@pytest.mark.usefixtures("deepspeed_in_parent")
def test_a_layout_computes_what_one_device_computes() -> None:
    found = train_each([planned(parallel) for parallel in LAYOUTS.values()])
    for trained in found:
        assert_equal(trained, alone())


@pytest.mark.parametrize("name", ["lion", "muon", "sgd"])
def test_another_optimizer_has_them_too(name: str) -> None:
    groups = {label: GROUPS[label] for label in ("ends",)}
    found = train(job(optim={"name": name, "groups": groups}))
    assert_only_the_ends_stay(found)


def test_servers_compute_what_one_device_computes(tmp_path: Path) -> None:
    plan = servers_job(optim={"groups": GROUPS})
    assert_equal(serve_and_train(plan, tmp_path).trained, alone())


def assert_only_the_ends_stay(found: Trained) -> None:
    plan = job()
    (model,) = build_chunks(make_context(plan))
    before = {slice_of(param).name: param.detach() for param in model.parameters()}
    same = {name for name, weight in before.items() if torch.equal(weight, found.weights[name])}
    assert same - {name for name in same if name.endswith(".k.bias")} == {*GROUPS["ends"].names}


def test_a_factor_slows_its_parameters_alone() -> None:
    assert_only_the_ends_stay(alone())


def forget_the_factors(trainer: Trainer, loader: Loader) -> None:
    for group in inside(trainer.update)._optimizer.param_groups:
        del group[LR_FACTOR]


def forget_the_decays(trainer: Trainer, loader: Loader) -> None:
    for group in inside(trainer.update)._optimizer.param_groups:
        group["weight_decay"] = 0.1


@pytest.mark.parametrize("sabotage", [forget_the_factors, forget_the_decays])
def test_what_is_forgotten_is_told_apart(sabotage: Any) -> None:
    expected = alone()
    with pytest.raises(AssertionError):
        assert_equal(train(planned({"dp": 2}), sabotage), expected)


def test_each_parameter_has_the_settings_of_its_group() -> None:
    ctx = make_context(planned())
    (model,) = build_chunks(ctx)
    optimizer = make_optimizer(((param, slice_of(param)) for param in model.parameters()), ctx)
    assert optimizer is not None
    found = {
        slice_of(param).name: (group["weight_decay"], group[LR_FACTOR])
        for group in optimizer.param_groups
        for param in group["params"]
    }
    assert found["layers.0.attention.q.weight"] == found["layers.3.attention.out.bias"] == (0.7, 3.0)
    assert found["layers.0.mlp_norm.weight"] == found["norm.bias"] == (0.5, 1.0)
    assert found["embedding.weight"] == (0.1, STILL)
    assert found["layers.0.mlp.up.weight"] == (0.1, 1.0)
    assert found["layers.0.mlp.up.bias"] == (0.0, 1.0)


def test_without_groups_matrices_decay_and_vectors_do_not() -> None:
    plan = job()
    ctx = make_context(replace(plan))
    (model,) = build_chunks(ctx)
    optimizer = make_optimizer(((param, slice_of(param)) for param in model.parameters()), ctx)
    assert optimizer is not None
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    dims = [{param.dim() for param in group["params"]} for group in optimizer.param_groups]
    assert dims == [{2}, {1}]


FROZEN = {
    "the norms": ("*norm.*",),
    "the first layers": ("embedding.*", "positions.*", "layers.[01].*"),
    "the tied embedding": ("embedding.weight",),
    "one in the middle": ("layers.2.*",),
}
FROZEN_LAYOUTS: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "sequence parallel": {"tp": 2, "sequence_parallel": True},
    "zero bubble": {"pp": 2, "schedule": "zb_h1"},
    "recomputed": {"pp": 2, "recompute": "full"},
    "selective": {"pp": 2, "recompute": "selective"},
    "zero 2": {"dp": 2, "zero_stage": 2},
    "tp2 recomputed": {"tp": 2, "recompute": "full"},
}


def frozen_plan(names: tuple[str, ...], parallel: dict[str, Any] | None = None) -> Plan:
    groups = {"still": GroupConfig(names=names, frozen=True)}
    return job(model={"vocab_size": 257}, parallel=parallel or {}, optim={"groups": groups})


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize("what", FROZEN)
def test_a_layout_freezes_what_one_device_freezes(what: str) -> None:
    expected = train(plan := frozen_plan(FROZEN[what]))
    (model,) = build_chunks(make_context(plan))
    still = {slice_of(param).name: param.detach() for param in model.parameters() if not param.requires_grad}
    assert still
    assert all(torch.equal(expected.weights[name], weight) for name, weight in still.items())
    assert not {name.partition("/")[2] for name in expected.moments} & still.keys()
    for found in train_each([frozen_plan(FROZEN[what], parallel) for parallel in FROZEN_LAYOUTS.values()]):
        assert_equal(found, expected)


def thaw(trainer: Trainer, loader: Loader) -> None:
    for param in trainer.part.modules[0].parameters():
        param.requires_grad_(True)
        param.register_post_accumulate_grad_hook(step_along)


def step_along(param: torch.Tensor) -> None:
    if slice_of(param).name.startswith("positions"):
        with torch.no_grad():
            param.sub_(0.01)


def test_frozen_weights_that_move_are_told_apart() -> None:
    plan = frozen_plan(("positions.weight",))
    expected = train(plan)
    with pytest.raises(AssertionError):
        assert_equal(train(plan, thaw), expected)


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize(
    ("before", "after"),
    [({"tp": 2}, {"pp": 2}), ({"pp": 2}, {"tp": 2}), ({"tp": 2}, {"dp": 2, "zero_stage": 3})],
)
@pytest.mark.parametrize("what", ["the norms", "the first layers"])
def test_frozen_weights_go_on_under_another_layout(
    what: str, before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    expected = losses_of(run_ranks(1, uninterrupted, frozen_plan(FROZEN[what])))
    found = losses_of(run_ranks(2, first_half, frozen_plan(FROZEN[what], before), tmp_path))
    found += losses_of(run_ranks(2, second_half, frozen_plan(FROZEN[what], after), tmp_path))
    assert found == pytest.approx(expected, rel=2e-5)
