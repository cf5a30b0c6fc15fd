"""Parameter servers in the plan: who is there, what is refused, and what the exchange takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.app.planning import make_plan
from launcher.base.errors import PlanError
from launcher.contract.config import LinkConfig, PluginChoice
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.plan.text import plan_text
from launcher_plugins.architectures.parameter_server.cost import Exchange
from tests.helpers.configs import launch_config

LINK = LinkConfig(latency_s=0.0, bandwidth_bytes_per_s=1e9)


def planned(workers: int = 4, *, optim: dict[str, Any] | None = None, **options: Any) -> Plan:
    parallel = {"dp": workers} | options.pop("parallel", {})
    cluster = {"devices_per_node": 32, "intra_node": LINK}
    config = launch_config(
        parallel=parallel,
        cluster=cluster,
        batch={"global_size": 16 * workers},
        architecture=PluginChoice(name="parameter_server", options=options),
    )
    return build(replace(config, optim=replace(config.optim, **(optim or {}))))


def test_the_world_is_workers_and_then_servers() -> None:
    plan = planned(3, servers=2)
    assert plan.world_size == 5
    assert [(role.name, role.first_rank, role.num_ranks) for role in plan.roles] == [
        ("trainer", 0, 3),
        ("server", 3, 2),
    ]
    assert plan.rank(4).coordinates is None
    assert plan.rank(4).role.serve == "launcher_plugins.architectures.parameter_server.runtime.server:serve"
    assert "2 more ranks: server, each holding" in plan_text(plan)


@pytest.mark.parametrize(
    ("options", "is_exact"),
    [
        ({}, True),
        ({"mode": "bounded", "staleness": 0}, True),
        ({"mode": "bounded", "staleness": 1}, False),
        ({"mode": "async"}, False),
        ({"compression": "bf16"}, False),
    ],
)
def test_only_lock_step_with_whole_gradients_computes_what_one_device_computes(
    options: dict[str, Any], is_exact: bool
) -> None:
    assert planned(**options).exact is is_exact


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"parallel": {"pp": 2}},
            r"parallel\.pp=2: each worker of a parameter server holds the whole model, .*"
            r"world = dp workers \+ servers, so tp and pp must be 1\. Set parallel\.pp=1\.",
        ),
        ({"parallel": {"tp": 2}}, r"parallel\.tp=2: each worker .* Set parallel\.tp=1\."),
        (
            {"parallel": {"zero_stage": 1}},
            r"the update is parameter_server's own, and ZeRO would be a second",
        ),
        (
            {"workers": 1},
            r"parallel\.dp=1: a parameter server needs at least 2 workers\. Set .*dp=2\.",
        ),
        ({"mode": "bounded"}, r"architecture\.mode=bounded: needs a bound\. Set architecture\.staleness=2\."),
        ({"staleness": 3}, r"architecture\.staleness=3: has an effect only in mode bounded, .*mode is sync"),
        ({"lr_scale": 0.5}, r"architecture\.lr_scale=0\.5: has an effect only where .* not in lock-step"),
        ({"compression": "top_k"}, r"needs the share .* Set architecture\.top_k_fraction=0\.01\."),
        ({"top_k_fraction": 0.1}, r"has an effect only with compression top_k, and it is none"),
        ({"servers": 0}, r"architecture\.servers=0: "),
    ],
)
def test_what_cannot_be_served_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(**settings)


BYTES = 120_000_000.0


def exchange(num_workers: int, num_servers: int, **changes: Any) -> Exchange:
    whole: dict[str, Any] = {
        "num_workers": num_workers,
        "num_servers": num_servers,
        "num_buckets": 10,
        "push_bytes": BYTES,
        "pull_bytes": BYTES,
        "link": LINK,
        "update_s": 0.0,
        "is_lockstep": True,
        "pulls_last": False,
        "overlaps": True,
    }
    return Exchange(**whole | changes)


@pytest.mark.parametrize(("num_servers", "expected_s"), [(1, 0.48), (2, 0.24), (4, 0.12), (8, 0.12)])
def test_fewer_servers_than_workers_are_the_bound(num_servers: int, expected_s: float) -> None:
    """max(M/B, n M/(k B)), both directions at once."""
    assert exchange(4, num_servers).total_s == pytest.approx(expected_s)
    assert exchange(4, num_servers, pulls_last=True).total_s == pytest.approx(2 * expected_s)


def test_the_plan_sets_it_beside_an_all_reduce() -> None:
    plan = planned(4, servers=2, optim={"clip_norm": None})
    found, num_bytes = plan.section("parameter_server"), 4 * plan.num_parameters
    assert found["all_reduce_s"] == pytest.approx(2 * 3 / 4 * num_bytes / 1e9)
    assert found["total_s"] == pytest.approx(4 / 2 * num_bytes / 1e9)
    assert found["even_servers"] == 3, "n^2 / (2 (n-1)) = 16/6"
    assert "as fast as an all-reduce from 3 servers on" in plan_text(plan)


@pytest.mark.parametrize(("num_servers", "factor"), [(0, 1.5), (1, 4 / 3), (2, 1.2), (4, 1.0)])
def test_parts_on_the_workers_machines_are_between_an_all_reduce_and_as_many_servers_as_workers(
    num_servers: int, factor: float
) -> None:
    """2 n (n-1) M / ((n^2 + k n - 2 k) B)."""
    assert exchange(4, num_servers).mixed_s == pytest.approx(factor * 0.12)


def test_the_plan_tells_them_where_servers_are_fewer_than_workers() -> None:
    fewer, as_many = (planned(4, servers=count, optim={"clip_norm": None}) for count in (2, 4))
    assert fewer.section("parameter_server")["mixed_s"] == pytest.approx(1.2 * 4 * fewer.num_parameters / 1e9)
    told = "with parts on the workers' machines as well, which is not built: "
    assert told in plan_text(fewer)
    assert told not in plan_text(as_many)


def test_no_number_of_servers_is_as_fast_when_a_norm_comes_between() -> None:
    plan = planned(4, servers=4)
    assert plan.section("parameter_server")["even_servers"] is None
    assert "however many servers, an all-reduce is faster" in plan_text(plan)


def test_a_backward_hides_a_push_but_for_its_last_bucket_and_a_forward_likewise_a_pull() -> None:
    """120 ms each way in 10 buckets, at 1 server per worker."""
    clipped = exchange(2, 2, pulls_last=True, update_s=0.01)
    assert clipped.in_step.exposed_s(0.05, 0.1, 1.0) == pytest.approx(0.03 + 0.01 + 0.075)
    assert clipped.in_step.exposed_s(0.5, 0.5, 1.0) == pytest.approx(0.012 + 0.01 + 0.012)
    apart = replace(clipped, overlaps=False)
    assert apart.in_step.exposed_s(0.5, 0.5, 1.0) == pytest.approx(0.12 + 0.01 + 0.12)


def test_what_the_servers_can_take_in_bounds_workers_on_their_own() -> None:
    """8 workers push 120 MB each to one server: 0.96 s a step at least."""
    alone = exchange(8, 1, is_lockstep=False, pulls_last=True)
    assert 0.5 + alone.in_step.exposed_s(0.2, 0.3, 0.5) == pytest.approx(0.96)
    assert alone.in_step.exposed_s(0.2, 0.3, 2.0) == pytest.approx(0.024)


def test_compression_shows_in_the_bytes_that_are_pushed() -> None:
    pushed = {}
    compressions: dict[str, dict[str, Any]] = {
        "none": {},
        "bf16": {"compression": "bf16"},
        "top_k": {"compression": "top_k", "top_k_fraction": 0.01},
    }
    for name, options in compressions.items():
        rows = planned(**options).traffic
        pushed[name] = next(row.sent_bytes for row in rows if row.purpose == "gradients")
        assert all(row.operation in ("push", "pull") for row in rows), "there is no all-reduce"
    assert pushed["bf16"] == pytest.approx(pushed["none"] / 2)
    assert pushed["top_k"] == pytest.approx(pushed["none"] * 0.02, rel=1e-4)


def test_what_workers_on_their_own_push_and_pull_adds_up_to_the_exchange_of_all() -> None:
    """8 workers and 2 servers share each link by 4; the row of one worker's messages is that of it alone."""
    plan = planned(8, servers=2, mode="async")
    found = plan.section("parameter_server")
    assert found["push_s"] + found["pull_s"] == pytest.approx(found["total_s"])
    alone_s = next(row.time_s for row in plan.traffic if row.operation == "push")
    assert found["push_s"] == pytest.approx(4 * alone_s, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["architecture.servers=7"],
            r"architecture\.servers=7: world = dp \* tp \* pp \+ servers = 2 \* 1 \* 1 \+ 7 = 9 ranks "
            r"\(.*servers from override architecture\.servers=7\), .* 1 \* 8 = 8 devices: which is too few; "
            r".* Set architecture\.servers=6, or cluster\.nodes=2\. \[override architecture\.servers=7\]",
        ),
        (
            ["architecture.servers=8", "parallel.dp=auto", "cluster.allow_idle_devices=false"],
            r"parallel\.dp=auto: dp = \(devices - servers\) / \(tp \* pp\) = \(8 - 8\) / \(1 \* 1\) is "
            r"below 1\. Set cluster\.nodes=2\.",
        ),
    ],
)
def test_servers_that_no_device_is_left_for_are_refused_by_their_name(
    overrides: list[str], text: str
) -> None:
    with pytest.raises(PlanError, match=text):
        make_plan("tiny_parameter_server_dp2_3xcpu", overrides)


def test_the_optimizer_is_in_the_memory_of_the_servers_alone() -> None:
    plan = planned(4, servers=2)
    assert plan.memory[0].optimizer_bytes == 0
    num_workers, gradient = 4, 4
    assert plan.roles[1].memory_bytes == plan.num_parameters * (16 + num_workers * gradient) // 2
