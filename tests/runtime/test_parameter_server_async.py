"""Workers on their own: what the servers hold in the end is what one process computes that makes the same
updates in the recorded order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from launcher.contract.plan import Plan
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.train.loop import Trainer
from tests.helpers.server_simulation import Simulation
from tests.helpers.servers import Served, assert_nearly_same, assert_same, serve_and_train, servers_job

STEPS = 5
MODES: dict[str, dict[str, Any]] = {
    "async": {"mode": "async"},
    "async, two servers": {"mode": "async", "servers": 2},
    "bounded by 1": {"mode": "bounded", "staleness": 1, "lr_scale": 0.7},
    "async, top_k": {"mode": "async", "servers": 2, "compression": "top_k", "top_k_fraction": 0.1},
    "async, bf16": {"mode": "async", "compression": "bf16"},
    "sync, top_k": {"mode": "sync", "compression": "top_k", "top_k_fraction": 0.1},
}


def compare(mode: str) -> Callable[[Served, dict[str, Tensor]], None]:
    return assert_nearly_same if "bf16" in mode else assert_same


def straggle(trainer: Trainer, loader: Loader, step: int) -> None:
    """The last worker is late once, so that the others' updates come between."""
    is_last = trainer.ctx.plan.rank == trainer.ctx.plan.plan.mesh.dp - 1
    time.sleep(0.6 if is_last and step == 1 else 0.01)


def three_workers(options: dict[str, Any]) -> Plan:
    return servers_job(
        workers=3, options=options, batch={"global_size": 6, "micro_size": 2}, train={"num_steps": STEPS}
    )


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Plan, Served]]:
    """Each mode is run once."""
    made = {}
    for mode, options in MODES.items():
        plan = three_workers(options)
        folder = tmp_path_factory.mktemp("run")
        made[mode] = plan, serve_and_train(plan, folder, straggle, num_steps=STEPS)
    return made


@pytest.mark.parametrize("mode", MODES)
def test_the_recorded_order_gives_the_same_parameters(mode: str, runs: Any) -> None:
    plan, served = runs[mode]
    compare(mode)(served, Simulation(plan, served.updates).run())


@pytest.mark.parametrize("mode", ["async, bf16", "sync, top_k"])
def test_what_compression_leaves_out_is_not_lost(mode: str, runs: Any) -> None:
    plan, served = runs[mode]
    forgetful = Simulation(plan, served.updates)
    forgetful.remembers = False
    with pytest.raises(AssertionError):
        compare(mode)(served, forgetful.run())


def test_updates_in_another_order_give_others(runs: Any) -> None:
    plan, served = runs["async"]
    (updates,) = served.updates
    place = next(n for n in range(1, len(updates)) if updates[n]["worker"] != updates[n - 1]["worker"])
    first, second = updates[place - 1], updates[place]
    swapped = [*updates[: place - 1], second, first, *updates[place + 1 :]]
    with pytest.raises((AssertionError, StopIteration)):
        assert_same(served, Simulation(plan, (swapped,)).run())


def test_gradients_of_fresher_parameters_give_others(runs: Any) -> None:
    plan, served = runs["async"]
    (updates,) = served.updates
    assert any(update["update"] != update["pulled_at"] for update in updates), "no gradient was stale"
    fresh = [update | {"pulled_at": update["update"]} for update in updates]
    with pytest.raises(AssertionError):
        assert_same(served, Simulation(plan, (fresh,)).run())


def test_no_worker_is_farther_ahead_than_the_bound(runs: Any) -> None:
    assert most_ahead(runs["bounded by 1"][1]) == 1
    assert most_ahead(runs["async"][1]) > 1, "the straggler was not late enough to show anything"


def most_ahead(served: Served) -> int:
    """Steps between a worker that makes an update and the slowest of all."""
    num_done = [0, 0, 0]
    found = []
    for update in served.updates[0]:
        found.append(update["step"] - min(num_done))
        num_done[update["worker"]] = update["step"] + 1
    return max(found)
