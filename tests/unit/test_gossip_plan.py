"""Neighbour averaging in a plan: its messages and memory, what hides them, and what is refused."""

from __future__ import annotations

import pytest

from launcher.base.errors import PlanError
from launcher.contract.config import LinkConfig, PluginChoice, PrecisionConfig
from launcher.plan.build import build
from tests.helpers.configs import FP32, MIXED, launch_config

GOSSIP = PluginChoice(name="gossip", options={})
BF16 = PrecisionConfig(name="bf16", compute="bf16", gradients="bf16", master_weights=False)
FP16 = PrecisionConfig(name="fp16", compute="fp16", gradients="fp16", master_weights=True)


PEAKS = {"peak_flops": {"fp32": 1e12, "bf16": 4e12, "fp16": 4e12}}


def gossip(precision=FP32, cluster=None, **parallel):
    return launch_config(
        parallel=parallel, architecture=GOSSIP, precision=precision, cluster=cluster, device=PEAKS
    )


def to_neighbours(plan):
    (row,) = (row for row in plan.traffic if row.purpose == "weights to neighbours" and row.pp_rank == 0)
    return row


@pytest.mark.parametrize(("dp", "num_neighbours"), [(2, 1), (4, 2), (8, 2)])
@pytest.mark.parametrize("precision", [FP32, MIXED])
def test_a_replica_sends_its_fp32_weights_once_to_each_neighbour(dp, num_neighbours, precision):
    plan = build(gossip(precision, dp=dp))
    row = to_neighbours(plan)
    assert (row.operation, row.count) == ("send_recv", num_neighbours)
    assert row.sent_bytes == num_neighbours * plan.num_parameters * 4
    assert row.time_s == pytest.approx(num_neighbours * (1e-6 + plan.num_parameters * 4 / 100e9))
    assert plan.memory[0].persistent_bytes["neighbours' weights"] == row.sent_bytes
    assert not [row for row in plan.traffic if row.purpose == "gradients"]
    assert not plan.exact


def test_the_exchange_hides_behind_the_whole_schedule_and_no_further():
    steps = []
    for bandwidth in (1e30, 1e12, 1e5):
        link = LinkConfig(latency_s=0.0, bandwidth_bytes_per_s=bandwidth)
        plan = build(gossip(cluster={"intra_node": link}, dp=4))
        others_s = sum(row.time_s for row in plan.traffic if row.purpose != "weights to neighbours")
        steps.append((plan.schedule.step_s - others_s, to_neighbours(plan).time_s))
    free, hidden, slow = steps
    assert hidden[0] == pytest.approx(free[0])
    assert slow[0] == pytest.approx(slow[1], rel=1e-3)  # the update after it is short


def test_messages_between_stages_are_not_mistaken_for_those_between_replicas():
    plans = [build(gossip(dp=2, pp=2)), build(launch_config(parallel={"dp": 2, "pp": 2}))]
    assert plans[0].schedule.transfer_s == plans[1].schedule.transfer_s


@pytest.mark.parametrize(
    ("config", "faults"),
    [
        (
            gossip(),
            [
                "architecture.name=gossip: averages each replica with its neighbours, and there is one "
                "replica (parallel.dp=1). Set architecture.name=decentralized, or parallel.dp=2."
            ],
        ),
        (
            gossip(FP16, dp=2),
            [
                "architecture.name=gossip: each replica would have a loss scale of its own "
                "(precision.compute=fp16). Set precision.compute=bf16 precision.gradients=fp32."
            ],
        ),
        (
            gossip(BF16, dp=2),
            [
                "architecture.name=gossip: averages in fp32, and the weights are kept in bf16 alone. "
                "Set precision.master_weights=true."
            ],
        ),
        (
            gossip(dp=2, zero_stage=1),
            [
                "parallel.zero_stage=1: the update is gossip's own, and ZeRO would be a second one. "
                "Set parallel.zero_stage=0."
            ],
        ),
    ],
)
def test_what_neighbours_cannot_average_is_refused(config, faults):
    with pytest.raises(PlanError) as error:
        build(config)
    assert [str(fault) for fault in error.value.faults] == faults
