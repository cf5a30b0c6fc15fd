from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.contract.optim.config import OptimConfig
from launcher.runtime.train.optimizer import learning_rate


def optim(decay: str, warmup_steps: int = 4) -> OptimConfig:
    return OptimConfig(
        name="adamw",
        lr=1.0,
        weight_decay=0.0,
        clip_norm=None,
        warmup_steps=warmup_steps,
        decay=decay,  # type: ignore[arg-type]
        min_lr_fraction=0.1,
    )


def test_the_warm_up_grows_in_equal_steps_from_above_zero() -> None:
    rates = [learning_rate(optim("cosine"), step, 20) for step in range(5)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(
    ("decay", "half_way", "last"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1)]
)
def test_the_decay_ends_at_its_floor(decay: str, half_way: float, last: float) -> None:
    settings = optim(decay, warmup_steps=0)
    assert learning_rate(settings, 0, 11) == pytest.approx(1.0)
    assert learning_rate(settings, 5, 11) == pytest.approx(half_way)
    assert learning_rate(settings, 10, 11) == pytest.approx(last)


def test_a_decay_with_an_end_of_its_own_is_the_same_however_many_steps_there_are() -> None:
    settings = replace(optim("cosine"), decay_steps=20)
    expected = [learning_rate(optim("cosine"), step, 20) for step in range(20)]
    assert [learning_rate(settings, step, 10) for step in range(10)] == expected[:10]
    assert [learning_rate(settings, step, 30) for step in range(30)] == [*expected, *[expected[-1]] * 10]


def test_a_training_that_ends_in_its_warm_up_is_no_error() -> None:
    assert learning_rate(optim("cosine", warmup_steps=10), 2, 3) == pytest.approx(3 / 11)
