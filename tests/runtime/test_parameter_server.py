"""Parameter servers in lock-step compute what one device computes; with a message gone wrong they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.runtime.data.microbatches import Loader
from launcher.runtime.train.loop import Trainer
from launcher_plugins.architectures.parameter_server.runtime.messages import WorkerChannels
from tests.helpers.equality import assert_equal, reference
from tests.helpers.objects import inside
from tests.helpers.ranks import RankError
from tests.helpers.servers import Work, serve_and_train, servers_job

LAYOUTS: dict[str, dict[str, Any]] = {
    "two workers, one server": {"model": {"dropout": 0.1}},
    "three servers, no clipping": {"options": {"servers": 3}, "optim": {"clip_norm": None}},
    "four workers, two servers, bounded by 0": {
        "workers": 4,
        "options": {"servers": 2, "mode": "bounded", "staleness": 0},
    },
    "without overlap": {"options": {"servers": 2, "overlap": False}},
    "split backward": {"parallel": {"schedule": "zb_h1"}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lock_step_computes_what_one_device_computes(layout: str, tmp_path: Path) -> None:
    settings = LAYOUTS[layout]
    expected = reference(settings.get("model", {}), **settings.get("optim", {}))
    assert_equal(serve_and_train(servers_job(**settings), tmp_path).trained, expected)


# What follows breaks one thing each; the comparison above must see it.


def change_one_push(factor: float) -> Work:
    """The second worker's second bucket of the second step is lost, or counts twice."""

    def change(trainer: Trainer, loader: Loader, step: int) -> None:
        if trainer.ctx.plan.rank != 1 or step != 1:
            return
        feedback = inside(trainer.update)._feedback
        pack = feedback.pack
        feedback.pack = lambda values, place: pack(values, place) * (factor if place[0] == 1 else 1)

    return change


def forget_one_pull(trainer: Trainer, loader: Loader, step: int) -> None:
    """One bucket of the second step's parameters is still the first's."""
    pulled = inside(trainer.update)._pulled[0]
    if step == 0:
        pulled.first = pulled.buffer.clone()
    if step == 1:
        for receive in pulled.receives:
            receive.wait()
        pulled.receives.clear()
        pulled.buffer.copy_(pulled.first)


@pytest.mark.parametrize(
    "sabotage", [change_one_push(0.0), change_one_push(2.0), forget_one_pull], ids=["lost", "twice", "stale"]
)
def test_the_comparison_sees_a_message_that_goes_wrong(sabotage: Work, tmp_path: Path) -> None:
    trained = serve_and_train(servers_job(), tmp_path, sabotage).trained
    refuse(lambda: assert_equal(trained, reference({})))


def test_the_comparison_sees_servers_that_clip_each_by_its_own_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sum_over_servers = WorkerChannels.sum_over_servers

    def own_alone(channels: WorkerChannels, value: float) -> float:
        total = sum_over_servers(channels, value)
        return total if value == round(value) else value  # shards are counted the same way

    monkeypatch.setattr(WorkerChannels, "sum_over_servers", own_alone)
    trained = serve_and_train(servers_job(options={"servers": 2}), tmp_path).trained
    refuse(lambda: assert_equal(trained, reference({})))


def refuse(compare: Callable[[], None]) -> None:
    with pytest.raises(AssertionError) as caught:
        compare()
    assert not isinstance(caught.value, RankError), "it crashed, which is not what the comparison is for"


def use_a_weight_behind_autograd(trainer: Trainer, loader: Loader, step: int) -> None:
    """The first layers' backward needs the value of the last one's weight, which autograd is not told."""
    if step == 0 and trainer.ctx.plan.rank == 0:
        (stage,) = trainer.part.modules.values()
        first, last = inside(stage).prologue.embedding, list(stage.parameters())[-1]
        first.register_forward_hook(lambda _, __, out: out * last.detach().flatten()[: out.shape[-1]])


def test_parameters_that_land_too_early_for_a_layer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="modified by an inplace operation"):
        serve_and_train(servers_job(), tmp_path, use_a_weight_behind_autograd)
