"""A user's own layers and data, over dp and pp: equal to one device, and loss falls."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from launcher.app.planning import plan_inputs
from launcher.base.errors import PlanError
from launcher.config.load import load
from launcher.contract.config import LaunchConfig
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.plan.checked_job import PlanInputs
from tests.helpers.configs import compose_sound
from tests.helpers.equality import Trained, assert_equal, train

pytestmark = pytest.mark.usefixtures("user_models")

FOLDER = Path(__file__).parent / "user_models"
RECIPE = str(FOLDER / "digits_cnn.yaml")
FLAT = ("optim.eps=1e-4", "optim.warmup_steps=1", "data.prefetch_batches=0")
"""A large eps: where a gradient is only rounding noise, Adam must not blow it up to a step of lr."""


def config_of(*overrides: str) -> LaunchConfig:
    composed = compose_sound(RECIPE, [*FLAT, *overrides])
    return load(composed.values, composed.sources)


@cache
def inputs() -> PlanInputs:
    """One process imports torch for all plans: no layout changes the model."""
    return plan_inputs(config_of(), (str(FOLDER),))


def digits(*overrides: str) -> Plan:
    return build(config_of(*overrides), inputs=inputs())


@cache
def reference() -> Trained:
    return train(digits("parallel.dp=1", "parallel.pp=1"))


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.dp=2", "parallel.pp=1"),
        ("parallel.dp=1", "parallel.pp=2", "parallel.schedule=gpipe"),
        ("parallel.dp=1", "parallel.pp=4"),
        ("parallel.dp=2", "parallel.pp=2", "parallel.layers_per_stage=[1,3]"),
        ("parallel.dp=1", "parallel.pp=2", "parallel.num_chunks=2", "parallel.schedule=interleaved_1f1b"),
    ],
    ids=" ".join,
)
def test_a_users_model_computes_what_one_device_computes(layout: tuple[str, ...]) -> None:
    assert_equal(train(digits(*layout)), reference())


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.dp=2", "parallel.pp=2", "parallel.zero_stage=1"),
        ("parallel.dp=2", "parallel.pp=1", "parallel.zero_stage=3"),
    ],
    ids=" ".join,
)
def test_a_users_model_computes_it_with_split_states(layout: tuple[str, ...]) -> None:
    assert_equal(train(digits(*layout)), reference())


def test_tensor_parallelism_of_a_users_model_is_refused_with_the_reason() -> None:
    with pytest.raises(
        PlanError, match=r"parallel\.tp=2: the layers that model\.target builds .* Set parallel\.tp=1"
    ):
        digits("parallel.dp=1", "parallel.pp=1", "parallel.tp=2")
