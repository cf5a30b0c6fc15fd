"""Gradients summed in two levels, in a plan: what they move over which link, and where there are no two."""

from __future__ import annotations

import pytest

from launcher.base.errors import PlanError
from launcher.contract.config import LinkConfig, PluginChoice
from launcher.plan.build import build
from tests.helpers.configs import launch_config

TWO_LEVELS = PluginChoice(name="decentralized", options={"reduce": "hierarchical"})
TWO_BY_FOUR = {"nodes": 2, "devices_per_node": 4}
INTRA, INTER = (1e-6, 100e9), (1e-5, 10e9)


def two_levels(cluster=TWO_BY_FOUR, *, global_size=24, **parallel):
    return launch_config(
        batch={"global_size": global_size}, cluster=cluster, parallel=parallel, architecture=TWO_LEVELS
    )


def gradients(config):
    rows = [row for row in build(config).traffic if row.purpose.startswith("gradients")]
    return {row.operation: row for row in rows}


def test_each_level_moves_its_share_over_its_own_link():
    rows = gradients(two_levels(dp=8))
    whole = rows["reduce_scatter"].message_bytes
    part = whole // 4
    assert rows["all_reduce"].message_bytes == part
    for operation in ("reduce_scatter", "all_gather"):
        assert rows[operation].sent_bytes == whole * 3 // 4
        assert rows[operation].time_s == pytest.approx(3 * INTRA[0] + whole * 3 / 4 / INTRA[1])
    assert rows["all_reduce"].sent_bytes == part  # 2 (n-1)/n of it over n = 2 nodes
    assert rows["all_reduce"].time_s == pytest.approx(2 * INTER[0] + part / INTER[1])


def test_two_levels_take_less_of_a_slow_link_than_one():
    flat = launch_config(batch={"global_size": 24}, cluster=TWO_BY_FOUR, parallel={"dp": 8})
    (whole,) = gradients(flat).values()
    assert sum(row.time_s for row in gradients(two_levels(dp=8)).values()) < whole.time_s / 3


def test_replicas_that_tensor_ranks_keep_apart_still_share_their_nodes():
    rows = gradients(two_levels(dp=4, tp=2))
    assert rows["reduce_scatter"].sent_bytes == rows["reduce_scatter"].message_bytes // 2


def test_the_last_bucket_has_all_its_messages_before_it():
    free = LinkConfig(latency_s=0.0, bandwidth_bytes_per_s=1e30)
    plans = [
        build(two_levels(cluster, global_size=96, dp=8, bucket_bytes=10**9))
        for cluster in (TWO_BY_FOUR, TWO_BY_FOUR | {"intra_node": free, "inter_node": free})
    ]
    assert plans[0].schedule.step_s - plans[1].schedule.step_s == pytest.approx(
        sum(row.time_s for row in plans[0].traffic if row.purpose.startswith("gradients"))
    )


@pytest.mark.parametrize(
    ("cluster", "parallel", "reason"),
    [
        ({"nodes": 1}, {"dp": 8}, "the cluster has one node, so there is nothing between nodes"),
        (
            TWO_BY_FOUR,
            {"dp": 4, "pp": 2},
            "the replicas of a group share one node, so there is nothing between nodes",
        ),
        (
            TWO_BY_FOUR,
            {"dp": 2, "tp": 4},
            "each of the 2 replicas of a group is on a node of its own (4 devices, taken by tp and pp), so "
            "there is nothing inside a node",
        ),
        (
            {"nodes": 2, "devices_per_node": 2},
            {"dp": 3},
            "a group has 2 and 1 replicas on its nodes, which must be as many",
        ),
        (TWO_BY_FOUR, {"tp": 4}, "there is one replica (parallel.dp=1), which sums with nobody"),
        (TWO_BY_FOUR, {"dp": 8, "zero_stage": 1}, "DeepSpeed exchanges the gradients of ZeRO itself"),
    ],
)
def test_one_level_is_refused_with_its_reason(cluster, parallel, reason):
    with pytest.raises(PlanError) as error:
        build(two_levels(cluster, **parallel))
    assert [str(fault) for fault in error.value.faults] == [
        f"architecture.reduce=hierarchical: sums inside each node and then between nodes; {reason}. "
        "Set architecture.reduce=flat."
    ]
