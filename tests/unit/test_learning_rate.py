from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from launcher.base.errors import ConfigError
from launcher.contract.optim.config import OptimConfig
from launcher.contract.optim.rates import learning_rate
from launcher.contract.plan import Plan


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


def rates(settings: OptimConfig, num_steps: int) -> list[float]:
    return [learning_rate(settings, step, num_steps) for step in range(num_steps)]


def test_wsd_stays_until_its_cooldown_and_then_falls_linearly() -> None:
    settings = replace(optim("wsd", warmup_steps=2), cooldown_steps=4)
    expected = [1 / 3, 2 / 3, *[1.0] * 6, *(0.1 + 0.9 * left / 4 for left in (3, 2, 1, 0))]
    assert rates(settings, 12) == pytest.approx(expected)


def test_wsd_falls_in_the_last_tenth_unless_it_is_told_otherwise() -> None:
    found = rates(optim("wsd", warmup_steps=0), 40)
    assert found[:36] == [1.0] * 36
    assert found[36:] == pytest.approx([0.775, 0.55, 0.325, 0.1])


def test_a_longer_wsd_has_the_same_rates_up_to_the_shorter_ones_cooldown() -> None:
    settings = replace(optim("wsd"), cooldown_steps=5)
    short, long = rates(settings, 20), rates(settings, 30)
    assert short[:15] == long[:15]
    assert short[15] < long[15]


def test_a_cooldown_that_begins_in_the_warm_up_begins_at_its_end() -> None:
    found = rates(replace(optim("wsd", warmup_steps=4), cooldown_steps=50), 10)
    assert found[4] == 1.0
    assert found[-1] == pytest.approx(0.1)
    assert all(later < sooner for sooner, later in pairwise(found[4:]))


def test_the_inverse_root_halves_in_four_times_the_steps_whatever_their_number() -> None:
    settings = replace(optim("inverse_sqrt", warmup_steps=3), min_lr_fraction=0.2)
    assert [learning_rate(settings, step, 100) for step in (3, 15, 63)] == pytest.approx([1.0, 0.5, 0.25])
    assert learning_rate(settings, 999, 2000) == 0.2
    assert rates(settings, 50) == [learning_rate(settings, step, 7000) for step in range(50)]


def test_the_inverse_root_falls_no_more_after_its_end() -> None:
    settings = replace(optim("inverse_sqrt", warmup_steps=0), decay_steps=4)
    assert rates(settings, 8)[3:] == [0.5] * 5


def test_a_cooldown_longer_than_what_the_warm_up_leaves_is_refused(make_plan: Callable[..., Plan]) -> None:
    message = (
        "optim.cooldown_steps=150: is longer than the 140 steps between the warm-up and the end of the "
        "decay. Set optim.cooldown_steps=140 or null."
    )
    with pytest.raises(ConfigError, match=message):
        make_plan("optim.decay=wsd", "optim.cooldown_steps=150")
    assert make_plan("optim.decay=wsd", "optim.cooldown_steps=140")


def test_a_cooldown_of_another_decay_is_refused(make_plan: Callable[..., Plan]) -> None:
    message = r"optim\.cooldown_steps=5: has no effect while optim\.decay is cosine"
    with pytest.raises(ConfigError, match=message):
        make_plan("optim.cooldown_steps=5")
