"""Workers on their own learn what the quickstart trains on, and do not where updates are left out."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from launcher.config.load import load
from launcher.plan.build import build
from launcher_plugins.architectures.parameter_server.runtime.update_rules import AsynchronousUpdate
from tests.helpers.configs import compose_sound
from tests.helpers.objects import substitute
from tests.helpers.servers import Served, serve_and_train

STEPS = 40
WORDS = (
    "architecture=parameter_server",
    "architecture.mode=async",
    "architecture.servers=2",
    "parallel.dp=2",
    "parallel.pp=1",
    "batch.seq_length=32",
    f"train.num_steps={STEPS}",
    "train.checkpoint_interval=1000",
)
"""The quickstart, with shorter sequences and fewer steps."""
STATED_LOSS = 3.6
"""It starts at 5.5. Five runs ended between 3.05 and 3.25: the order of the updates is never the same."""


def quickstart(folder: Path) -> Served:
    composed = compose_sound("quickstart", (*WORDS, f"data.cache_dir={folder}"))
    plan = build(load(composed.values, composed.sources, composed.faults))
    return serve_and_train(plan, folder, num_steps=STEPS)


def last_loss(served: Served) -> float:
    """The median of the last steps, in which a single one may be high."""
    return median(served.trained.losses[-STEPS // 4 :])


def test_workers_on_their_own_learn_the_quickstart_to_the_stated_loss(tmp_path: Path) -> None:
    served = quickstart(tmp_path)
    assert any(update["update"] > update["pulled_at"] for update in served.updates[0]), "none was stale"
    assert served.trained.losses[0] > 5.4
    assert last_loss(served) < STATED_LOSS


def test_the_stated_loss_is_missed_where_one_of_two_servers_forgets_its_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = AsynchronousUpdate.done

    def forgetting(rule: AsynchronousUpdate, worker: int, notice: Any) -> None:
        if not rule._channels.is_first:
            for piece in rule._shard.pieces.values():
                substitute(piece, "update", lambda lr, factor: None)
        done(rule, worker, notice)

    monkeypatch.setattr(AsynchronousUpdate, "done", forgetting)
    assert last_loss(quickstart(tmp_path)) > STATED_LOSS
