"""What is wrong with groups of parameters is told as a plan is made."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.contract.optim.config import GroupConfig
from launcher.plan.build import build
from tests.helpers.configs import launch_config, with_settings


@pytest.mark.parametrize(
    ("groups", "told"),
    [
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
            "optim.groups.up=['head.weight']: changes nothing of these parameters. Give "
            "optim.groups.up.lr_factor or optim.groups.up.weight_decay, or remove it.",
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
    ids=["a near name", "no near name", "nothing", "no names", "two groups"],
)
def test_a_group_that_is_wrong_is_refused(groups: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        build(with_settings(launch_config(), {"optim": {"groups": groups}}))


def test_deepspeed_needs_the_same_groups_on_every_pipeline_rank() -> None:
    groups = {"up": GroupConfig(names=("head.*",), lr_factor=2.0)}
    config = launch_config(parallel={"dp": 2, "pp": 2, "zero_stage": 1})
    told = (
        "optim.groups=up: DeepSpeed needs the same groups of parameters on every pipeline rank, and these "
        "are by name. Set parallel.zero_stage=0"
    )
    with pytest.raises(ConfigError, match=re.escape(told)):
        build(with_settings(config, {"optim": {"groups": groups}}))
    assert build(with_settings(launch_config(parallel={"pp": 2}), {"optim": {"groups": groups}}))
