"""The optimizers that come with the launcher, as plans see them."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.contract.config import LaunchConfig, PluginChoice
from launcher.contract.optim.plugin import Optimizer
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.plan.cost.shapes import model_shape, resolve_model
from launcher.plan.text import plan_text
from launcher.testing.conformance import OptimizerConformance
from launcher_plugins.optimizers.adafactor import Adafactor
from launcher_plugins.optimizers.adamw import AdamW
from launcher_plugins.optimizers.lion import Lion
from launcher_plugins.optimizers.muon import Muon
from launcher_plugins.optimizers.sgd import SGD
from tests.helpers.configs import LLAMA3_8B, MIXED, job_shape, launch_config, with_settings


class TestAdamWConforms(OptimizerConformance):
    plugin, name = AdamW, "adamw"


class TestSGDConforms(OptimizerConformance):
    plugin, name = SGD, "sgd"


class TestSGDWithoutMomentumConforms(OptimizerConformance):
    plugin, name = SGD, "sgd"
    options = {"momentum": 0}  # noqa: RUF012


class TestLionConforms(OptimizerConformance):
    plugin, name = Lion, "lion"


class TestAdafactorConforms(OptimizerConformance):
    plugin, name = Adafactor, "adafactor"


class TestMuonConforms(OptimizerConformance):
    plugin, name = Muon, "muon"


GPT = {"num_layers": 4, "hidden_size": 64, "vocab_size": 256}
"""The test model: in a layer 4 matrices of 64 x 64 and 2 of 64 x 256, one vector for each and two norms."""
NUM_HIDDEN = 4 * 12 * 64 * 64
NUM_TABLES = (256 + 32 + 256) * 64
"""Elements of token table, positions and head."""
NUM_VECTORS = 4 * (4 * 64 + 256 + 64 + 4 * 64) + 2 * 64


def config(name: str, options: dict[str, Any] | None = None, **sections: Any) -> LaunchConfig:
    return with_settings(launch_config(**sections), {"optim": {"name": name, **(options or {})}})


@pytest.mark.parametrize(
    ("name", "options", "num_elements"),
    [
        ("adamw", {}, 2 * (NUM_HIDDEN + NUM_TABLES + NUM_VECTORS)),
        ("sgd", {}, NUM_HIDDEN + NUM_TABLES + NUM_VECTORS),
        ("sgd", {"momentum": 0}, 0),
        ("lion", {}, NUM_HIDDEN + NUM_TABLES + NUM_VECTORS),
        ("muon", {}, NUM_HIDDEN + 2 * (NUM_TABLES + NUM_VECTORS)),
        ("muon", {"adamw_names": ["*.mlp.*"]}, NUM_HIDDEN + 2 * (NUM_TABLES + NUM_VECTORS) + 4 * 8 * 64 * 64),
        (
            "adafactor",
            {},
            4 * (4 * (64 + 64) + 2 * (64 + 256)) + (256 + 64) * 2 + (32 + 64) + NUM_VECTORS,
        ),
    ],
)
def test_a_plan_has_the_states_of_its_optimizer(
    name: str, options: dict[str, Any], num_elements: int
) -> None:
    job = job_shape(config(name, options, model=GPT))
    assert job.model.num_parameters == NUM_HIDDEN + NUM_TABLES + NUM_VECTORS
    assert job.num_state_elements(0) == job.num_state_elements() == num_elements
    assert job.unsharded_states(0).optimizer_bytes == 4 * num_elements
    assert build(job.config).num_state_elements == num_elements


def test_a_tied_table_has_its_states_on_each_rank_that_updates_it() -> None:
    tied = GPT | {"tied_embeddings": True}
    job = job_shape(config("adafactor", model=tied, parallel={"pp": 2}))
    assert job.num_state_elements(0) + job.num_state_elements(1) == job.num_state_elements() + 256 + 64


def test_states_are_fp32_beside_an_fp32_copy_of_the_weights() -> None:
    job = job_shape(config("lion", model=GPT, precision=MIXED))
    assert job.unsharded_states(0).optimizer_bytes == 8 * job.model.num_parameters


@pytest.mark.parametrize(
    ("name", "per_parameter"), [("adamw", 20), ("lion", 16), ("sgd", 16)], ids=["two", "one", "one sum"]
)
def test_zero_splits_what_the_optimizer_keeps(name: str, per_parameter: int) -> None:
    plan = build(config(name, model=GPT, parallel={"dp": 4, "zero_stage": 3}))
    (states,) = plan.section("zero")["states_bytes"]
    assert states[3] == pytest.approx(plan.num_parameters * per_parameter / 4, rel=0.001)


@pytest.mark.parametrize("model", [GPT, LLAMA3_8B | {"num_layers": 2}], ids=["gpt", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_of_a_model_have_the_elements_that_are_counted(
    model: dict[str, Any], tied: bool
) -> None:
    resolved = resolve_model(launch_config(model=model | {"tied_embeddings": tied}).model)
    shape = model_shape(resolved, 32, has_fused_norm=True)
    assert sum(prod(each.shape) for each in shape.parameters) == shape.num_parameters


@pytest.mark.parametrize(
    ("name", "options", "sections", "message"),
    [
        (
            "sgd",
            {"momentum": 0, "nesterov": True},
            {},
            "optim.nesterov=true: looks ahead along the sum of the gradients, and optim.momentum=0 keeps "
            "none. Set optim.momentum=0.9, or optim.nesterov=false.",
        ),
        (
            "muon",
            {"adamw_names": ["layers.0.mlp.up.wieght"]},
            {},
            "optim.adamw_names=layers.0.mlp.up.wieght: matches the name of no parameter. Did you mean "
            "layers.0.mlp.up.weight?",
        ),
        (
            "muon",
            {"adamw_names": ["zzz*"]},
            {},
            "optim.adamw_names=zzz*: matches the name of no parameter. A name is such as head.weight.",
        ),
        (
            "muon",
            {},
            {"parallel": {"tp": 2}},
            "optim.name=muon: updates a tensor by all of its elements, and parallel.tp=2 leaves a part of "
            "each matrix on a rank. Set parallel.tp=1",
        ),
        (
            "adafactor",
            {},
            {"parallel": {"dp": 2, "zero_stage": 1}},
            "optim.name=adafactor: updates a tensor by all of its elements, and ZeRO splits all tensors of a "
            "rank in equal parts. Set parallel.zero_stage=0",
        ),
        (
            "adafactor",
            {},
            {
                "parallel": {"dp": 2},
                "architecture": PluginChoice(name="parameter_server", options={}),
            },
            "optim.name=adafactor: updates a tensor by all of its elements, and servers hold ranges of "
            "elements that begin and end anywhere. Set architecture.name=decentralized",
        ),
    ],
    ids=["nesterov", "a name", "no near name", "tensor parallel", "zero", "servers"],
)
def test_what_an_optimizer_cannot_do_is_refused(
    name: str, options: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(config(name, options, **sections))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.name=adamm", "optim.name=adamm: no optimizer of that name is installed. Did you mean adamw?"),
        ("+optim.beta=[0.8,0.9]", "not a setting here. Did you mean betas?"),
        ("+optim.weight_deca=1", "optim.weight_deca=1: not a setting here. Did you mean weight_decay?"),
        ("+optim.num_iterations=1", "optim.num_iterations=1: not a setting here. It belongs to optim muon."),
        ("optim.eps=0", "optim.eps=0: must be a finite number above 0"),
        ("optim.betas=[0.9]", "optim.betas=[0.9]: must have 2 items, not 1"),
    ],
)
def test_an_unknown_optimizer_or_option_is_refused_with_what_is_meant(
    word: str, message: str, make_plan: Callable[..., Plan]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(word)
    assert message in " ".join(str(caught.value).split())


@pytest.mark.parametrize(
    ("name", "asked", "found"),
    [
        ("adamw", "fused", "fused"),
        ("adafactor", "fused", "foreach"),
        ("adafactor", "loop", "loop"),
        ("lion", "foreach", "loop"),
    ],
)
def test_a_plan_shows_the_kernels_that_the_optimizer_has(name: str, asked: str, found: str) -> None:
    plan = build(with_settings(config(name), {"fusion": {"optimizer": asked}}))
    assert re.search(rf"^  optimizer +{found} ", plan_text(plan), re.MULTILINE)


def test_kernels_that_the_optimizer_has_no_choice_of_cannot_be_chosen(make_plan: Callable[..., Plan]) -> None:
    message = "fusion.optimizer=foreach: has no effect while optim.name is lion. Leave it out, or set another"
    with pytest.raises(ConfigError, match=message):
        make_plan("optim=lion", "fusion.optimizer=foreach")


@pytest.mark.parametrize("name", ["sgd", "adafactor", "lion", "muon"])
def test_each_has_a_file_with_its_defaults(name: str, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(f"optim={name}")
    assert plan.config.optim.name == name
    assert {record.name for record in plan.plugins if record.group == Optimizer.entry_group} == {name}
