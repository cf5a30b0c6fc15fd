"""Jobs whose gradients are summed inside each node and then between nodes, and what breaks a sum."""

from __future__ import annotations

from itertools import count
from typing import Any

from launcher.runtime.train.loop import Trainer
from launcher_plugins.architectures.decentralized.runtime import HierarchicalSum
from tests.helpers.equality import Sabotage
from tests.helpers.objects import inside

TWO_BY_TWO = {"nodes": 2, "devices_per_node": 2}
TWO_LEVELS: dict[str, Any] = {
    "architecture": {"options": {"reduce": "hierarchical"}},
    "cluster": TWO_BY_TWO,
}
"""Sections of a job with four replicas."""


def skip_a_level(name: str) -> Sabotage:
    """Leaves one level out for one bucket, on every rank, so that nobody waits for a message."""

    def sabotage(trainer: Trainer, loader: object) -> None:
        levels = inside(trainer.update)._buckets.exchange
        assert isinstance(levels, HierarchicalSum), "the update uses another exchange"
        calls, whole = count(), getattr(levels, name)
        setattr(levels, name, lambda *tensors: None if next(calls) == 1 else whole(*tensors))

    return sabotage
