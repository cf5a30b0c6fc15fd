"""global_size = micro_size * num_microbatches * dp, from any of the three."""

from __future__ import annotations

import pytest

from launcher.contract.plan import BatchPlan
from launcher.plan.layout.batch import assumed_note, solve
from tests.helpers.configs import launch_config


def batch(*, total=None, micro=None, count=None):
    sizes = {"global_size": total, "micro_size": micro, "num_microbatches": count}
    return launch_config(batch=sizes).batch


def solved(dp, **given):
    return solve(batch(**given), dp)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"total": 24}, (24, 1, 12)),
        ({"micro": 3}, (6, 3, 1)),
        ({"count": 4}, (8, 1, 4)),
        ({"total": 24, "micro": 3}, (24, 3, 4)),
        ({"total": 24, "count": 4}, (24, 3, 4)),
        ({"micro": 3, "count": 4}, (24, 3, 4)),
        ({"total": 24, "micro": 3, "count": 4}, (24, 3, 4)),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_every_subset_of_the_sizes_gives_the_others(given, sizes):
    found = solved(2, **given)
    assert (found.global_size, found.micro_size, found.num_microbatches) == sizes
    assert found.global_size == found.micro_size * found.num_microbatches * 2


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({"total": 24}, "batch.micro_size: not given, taken as 1."),
        ({"micro": 3}, "batch.num_microbatches: not given, taken as 1."),
        ({"count": 4}, "batch.micro_size: not given, taken as 1."),
        ({"total": 24, "micro": 3}, ""),
        ({"total": 24, "count": 4}, ""),
    ],
)
def test_a_size_that_was_guessed_is_said(given, note):
    assert isinstance(solved(2, **given), BatchPlan)
    assert assumed_note(batch(**given)) == note


def test_no_size_at_all_is_refused():
    assert str(solved(2)) == (
        "batch.global_size=null: one of global_size, micro_size and num_microbatches is needed. "
        "Set batch.global_size=2."
    )


def test_a_global_batch_that_does_not_divide_is_refused_with_both_neighbours():
    assert str(solved(7, total=256, micro=2)) == (
        "batch.global_size=256: must be a multiple of micro_size * dp = 2 * 7 = 14; 256/14 is not whole. "
        "Set batch.global_size=252 or 266, or parallel.dp=8 or 4."
    )


def test_a_global_batch_smaller_than_one_microbatch_offers_only_a_larger_one():
    assert str(solved(7, total=5, micro=2)).endswith("Set batch.global_size=14.")


def test_a_batch_that_its_microbatches_do_not_divide_is_refused():
    assert str(solved(1, total=8, count=3)) == (
        "batch.global_size=8: must be a multiple of num_microbatches * dp = 3 * 1 = 3; 8/3 is not whole. "
        "Set batch.global_size=6 or 9, or batch.num_microbatches=4 or 2."
    )


def test_three_sizes_that_disagree_are_refused():
    assert str(solved(7, total=256, micro=2, count=18)) == (
        "batch.global_size=256: must be micro_size * num_microbatches * dp = 2 * 18 * 7 = 252. "
        "Set batch.global_size=252."
    )
