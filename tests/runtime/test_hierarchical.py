"""Gradients summed inside each node and then between nodes: the same sums, and the same training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.contract.plan import Plan
from launcher.runtime.process.rank import make_context
from launcher_plugins.architectures.decentralized.runtime import HierarchicalSum
from tests.helpers.equality import assert_equal, job, reference, train
from tests.helpers.objects import substitute
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.two_levels import TWO_BY_TWO, TWO_LEVELS, skip_a_level

GPT = {"family": "gpt"}


def two_levels(parallel: dict[str, Any], cluster: dict[str, Any] = TWO_BY_TWO, **sections: Any) -> Plan:
    return job(model=GPT, parallel=parallel, **TWO_LEVELS | {"cluster": cluster}, **sections)


@pytest.mark.parametrize(
    ("parallel", "cluster"),
    [
        ({"dp": 4}, TWO_BY_TWO),
        ({"dp": 4, "pp": 2, "rank_order": "dp-pp-tp"}, {"nodes": 2, "devices_per_node": 4}),
    ],
)
def test_two_levels_compute_what_one_device_computes(
    parallel: dict[str, Any], cluster: dict[str, Any]
) -> None:
    assert_equal(train(two_levels(parallel, cluster)), reference(GPT))


def test_the_comparison_sees_a_bucket_that_is_not_summed_between_nodes() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_equal(train(two_levels({"dp": 4}), skip_a_level("sum_across")), reference(GPT))
    assert not isinstance(caught.value, RankError), "it crashed, which is not what the comparison is for"


def sums(rank: int, plan: Plan, sizes: list[int]) -> list[list[float]]:
    levels = HierarchicalSum(make_context(plan.rank(rank), torch.device("cpu")))
    buckets = [torch.arange(size, dtype=torch.float32) + 100 * rank for size in sizes]
    for handle in [levels(bucket) for bucket in buckets]:
        handle.wait()
    return [bucket.tolist() for bucket in buckets]


def test_buckets_that_a_node_cannot_share_evenly_are_summed_whole() -> None:
    sizes = [1, 2, 3, 7, 1001]
    plan = two_levels({"dp": 6}, {"nodes": 2, "devices_per_node": 3}, batch={"global_size": 12})
    expected = [[6.0 * place + 1500 for place in range(size)] for size in sizes]
    assert run_ranks(6, sums, plan, sizes) == [expected] * 6


def test_a_level_that_fails_is_told_where_the_sum_is_waited_for() -> None:
    def broken(rank: int, plan: Plan) -> str:
        levels = HierarchicalSum(make_context(plan.rank(rank), torch.device("cpu")))
        substitute(levels, "sum_across", lambda part: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            levels(torch.ones(4)).wait()
        return "told"

    assert run_ranks(4, broken, two_levels({"dp": 4})) == ["told"] * 4
