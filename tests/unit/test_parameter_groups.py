"""What is wrong with groups of parameters is told as a plan is made."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.contract.optim.config import GroupConfig
from launcher.contract.strategy import JobShape
from launcher.plan.build import build
from tests.helpers.configs import job_shape, launch_config, with_settings


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (
            {"up": GroupConfig(names=("head.weight",), weight_decay=2.0, frozen=True)},
            "optim.groups.up.weight_decay=2.0: has no effect on parameters that are frozen "
            "(optim.groups.up.frozen). Leave one of the two out.",
        ),
        (
            {"up": GroupConfig(names=("*",), frozen=True)},
            "optim.groups.up.frozen=true: leaves nothing to train: no other parameter gets a gradient. "
            "Leave some parameter out of what is frozen.",
        ),
        (
            {"up": GroupConfig(names=("layers.0.mlp.up.wieght",), lr_factor=2.0)},
            "optim.groups.up.names=layers.0.mlp.up.wieght: matches the name of no parameter that is trained. "
            "Did you mean layers.0.mlp.up.weight?",
        ),
        (
            {"up": GroupConfig(names=("zzz*",), lr_factor=2.0)},
            "optim.groups.up.names=zzz*: matches the name of no parameter that is trained. A name is such as "
            "head.weight.",
        ),
        (
            {"up": GroupConfig(names=("head.weight",))},
            "optim.groups.up=['head.weight']: changes nothing of these parameters. Give lr_factor, "
            "weight_decay or frozen beside its names, or remove optim.groups.up.",
        ),
        (
            {"up": GroupConfig(names=(), lr_factor=2.0)},
            "optim.groups.up.names=[]: holds no parameter. Give names, or remove optim.groups.up.",
        ),
        (
            {
                "up": GroupConfig(names=("head.*",), lr_factor=2.0),
                "down": GroupConfig(names=("head.weight",), lr_factor=3.0),
            },
            "optim.groups.down.names=['head.weight']: head.weight is in up and down, and a parameter is "
            "updated in one way. Let each name match in one group.",
        ),
    ],
    ids=["frozen and decayed", "all", "a near name", "no near name", "nothing", "no names", "two groups"],
)
def test_a_group_that_is_wrong_is_refused(groups: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        build(with_settings(launch_config(), {"optim": {"groups": groups}}))


def test_deepspeed_needs_the_same_groups_on_every_pipeline_rank() -> None:
    groups = {"up": GroupConfig(names=("head.*",), lr_factor=2.0)}
    config = launch_config(parallel={"dp": 2, "pp": 2, "zero_stage": 1})
    told = (
        "optim.groups.up.names=['head.*']: DeepSpeed needs the same groups of parameters on every pipeline "
        "rank, and these are by name. Set parallel.zero_stage=0"
    )
    with pytest.raises(ConfigError, match=re.escape(told)):
        build(with_settings(config, {"optim": {"groups": groups}}))
    assert build(with_settings(launch_config(parallel={"pp": 2}), {"optim": {"groups": groups}}))


NORMS = GroupConfig(names=("*norm.*",), frozen=True)
FIRST = GroupConfig(names=("embedding.*", "positions.*", "layers.0.*"), frozen=True)


def shape_of(group: GroupConfig, **sections: Any) -> JobShape:
    config = launch_config(**sections)
    return job_shape(with_settings(config, {"optim": {"groups": {"still": group}}}))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("group", [NORMS, FIRST], ids=["norms", "the first layers"])
def test_frozen_parameters_have_neither_gradient_nor_state(group: GroupConfig, tied: bool, tp: int) -> None:
    sections: dict[str, Any] = {"model": {"tied_embeddings": tied}, "parallel": {"tp": tp}}
    job = shape_of(group, **sections)
    named = [each for each in job.model.parameters if each.is_trained]
    assert job.model.num_trained_parameters == sum(prod(each.shape) for each in named)
    local = sum(prod(each.shape) // (tp if each.is_split else 1) for each in named)
    states = job.unsharded_states(0)
    assert job.num_trained_parameters(0) == local
    assert (states.gradients_bytes, states.optimizer_bytes) == (4 * local, 8 * local)
    assert states.weights_bytes == job_shape(launch_config(**sections)).unsharded_states(0).weights_bytes


def test_what_is_split_over_tp_is_what_is_not_replicated() -> None:
    for part in job_shape(launch_config()).model.parts:
        split = sum(prod(each.shape) for each in part.parameters if each.is_split)
        assert split == part.num_parameters - part.num_replicated_parameters


def test_layers_up_to_which_nothing_is_trained_have_no_backward() -> None:
    job = shape_of(FIRST, parallel={"pp": 2})
    assert [part.has_backward for part in job.model.parts] == [False, False, True, True, True, True]
    assert [stage.num_frozen for stage in job.stages] == [1, 0]
    assert job.model.layers[0].backward_flops == job.model.layers[0].kept_elements == 0
    assert (
        not shape_of(
            GroupConfig(names=("embedding.*", "positions.*", "layers.[01].*"), frozen=True),
            parallel={"pp": 2},
        )
        .stages[1]
        .is_frozen
    )


def test_a_layer_that_is_frozen_behind_a_trained_one_passes_its_gradient_on() -> None:
    job = shape_of(GroupConfig(names=("layers.1.*",), frozen=True))
    whole = job_shape(launch_config()).model.layers[1]
    assert job.model.layers[1].has_backward
    assert job.model.layers[1].backward_flops == 2 * whole.forward_flops - whole.weight_flops
