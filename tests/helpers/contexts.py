"""A tiny configuration for the runtime, and the context of a rank without a run."""

from __future__ import annotations

from typing import Any

import torch

from launcher.contract.config import LaunchConfig, LinkConfig
from launcher.contract.mesh import Mesh
from launcher.contract.plan import Plan, RankPlan
from launcher.runtime.api import DTYPES, RankContext
from launcher.runtime.measure.clock import Clock
from launcher.runtime.model.deferred_weight_gradients import SplitBackward
from launcher.runtime.model.layers import Layers
from launcher.runtime.process.groups import Group, Groups, make_groups
from tests.helpers.configs import launch_config, with_settings

CPU = torch.device("cpu")
WHOLE = SplitBackward(is_enabled=False)


def make_config(**sections: dict[str, Any]) -> LaunchConfig:
    """A tiny GPT on one rank; each keyword replaces some settings of a section: ``model={...}``."""
    return with_settings(_default_config(), sections)


def make_context(plan: Plan, rank: int = 0) -> RankContext:
    """The context of one rank; with its real groups where a process group exists, else alone."""
    rank_plan = plan.rank(rank)
    is_alone = not torch.distributed.is_initialized()
    return RankContext(
        plan=rank_plan,
        device=CPU,
        groups=_lonely_groups(rank) if is_alone else _groups(plan.mesh, rank, rank_plan),
        clock=Clock(CPU),
        split_backward=WHOLE,
        layers=Layers(CPU, DTYPES[plan.config.precision.compute], WHOLE),
    )


def _groups(mesh: Mesh, rank: int, plan: RankPlan, made: dict[tuple[Mesh, int], Groups] = {}) -> Groups:  # noqa: B006
    """Groups are dear: one set serves every plan of a process that has the same mesh and stages' ends."""
    if (mesh, rank) not in made:
        made[mesh, rank] = make_groups(plan, 30)
    return made[mesh, rank]


def _lonely_groups(rank: int) -> Groups:
    alone = Group(ranks=(rank,), rank=0, handle=None)
    return Groups(**dict.fromkeys(Groups.__dataclass_fields__, alone))


def _default_config() -> LaunchConfig:
    link = LinkConfig(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "name": "test",
            "num_layers": 2,
            "hidden_size": 16,
            "vocab_size": 37,
            "tied_embeddings": True,
            "init_std": 0.3,
        },
        "data": {"source": None},
        "batch": {"global_size": None, "micro_size": 2, "num_microbatches": 1, "seq_length": 6},
        "optim": {"warmup_steps": 2, "decay": "cosine"},
        "train": {"num_steps": 4},
        "precision": {"master_weights": True},
        "device": {
            "name": "cpu",
            "kind": "cpu",
            "peak_flops": {"fp32": 1e9},
            "memory_bytes": 1 << 30,
            "memory_bandwidth_bytes_per_s": 1e9,
            "attainable_fraction": 1.0,
        },
        "cluster": {"name": "local", "intra_node": link, "inter_node": link},
        "parallel": {"bucket_bytes": 1 << 20},
        "run": {"timeout_s": 30.0, "start_timeout_s": 30.0},
    }
    return with_settings(launch_config(seed=7), sections)
