"""Small configurations, plans and contexts, built by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from launcher.contract.config import LaunchConfig, LinkConfig
from launcher.contract.mesh import Mesh
from launcher.contract.plan import VERSION, BatchPlan, Plan, RankPlan, RolePlan, SchedulePlan, StagePlan
from launcher.plan.layout.partition import modes
from launcher.runtime.api import DTYPES, RankContext
from launcher.runtime.measure.clock import Clock
from launcher.runtime.model.layers import WholeLayers
from launcher.runtime.model.split_backward import SplitBackward
from launcher.runtime.process.groups import Group, Groups, make_groups
from tests.helpers.configs import launch_config, with_settings

CPU = torch.device("cpu")
WHOLE = SplitBackward(is_enabled=False)


def make_config(**sections: dict[str, Any]) -> LaunchConfig:
    """A tiny GPT on one rank; each keyword replaces some settings of a section: ``model={...}``."""
    return with_settings(_default_config(), sections)


def make_plan(config: LaunchConfig, layers_per_stage: Sequence[int] | None = None) -> Plan:
    """A plan with the fields that the runtime reads; its predictions are zero."""
    parallel, batch = config.parallel, config.batch
    assert isinstance(parallel.dp, int), "tests give dp as a number"
    mesh = Mesh(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp)
    counts = layers_per_stage or [config.model.num_layers or 0]
    micro, num = batch.micro_size or 1, batch.num_microbatches or 1
    return Plan(
        version=VERSION,
        config=config,
        mesh=mesh,
        roles=(RolePlan(name="trainer", first_rank=0, num_ranks=mesh.num_ranks, trains=True),),
        batch=BatchPlan(
            global_size=micro * num * mesh.dp,
            micro_size=micro,
            num_microbatches=num,
            seq_length=batch.seq_length,
            padded_vocab_size=None,
        ),
        stages=tuple(_stages(config, counts)),
        num_parameters=0,
        step_flops=0.0,
        schedule=SchedulePlan(
            name="1f1b",
            actions=("",) * mesh.pp,
            bubble_formula=None,
            bubble_simulated=0.0,
            forward_s=(),
            backward_s=(),
            transfer_s=0.0,
            step_s=0.0,
        ),
        memory=(),
        traffic=(),
        plugins=(),
        parallels=(),
        update="",
        exact=True,
        notes=(),
        source_roots=(),
    )


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
        layers=WholeLayers(CPU, DTYPES[plan.config.precision.compute], WHOLE),
    )


def _groups(mesh: Mesh, rank: int, plan: RankPlan, made: dict[tuple[Mesh, int], Groups] = {}) -> Groups:  # noqa: B006
    """Groups are dear: one set serves every plan of a process that has the same mesh and stages' ends."""
    if (mesh, rank) not in made:
        made[mesh, rank] = make_groups(plan, 30)
    return made[mesh, rank]


def _lonely_groups(rank: int) -> Groups:
    alone = Group(ranks=(rank,), rank=0, handle=None)
    return Groups(**dict.fromkeys(Groups.__dataclass_fields__, alone))


def _stages(config: LaunchConfig, counts: Sequence[int]) -> list[StagePlan]:
    stages = []
    hidden = (config.batch.seq_length, config.model.hidden_size or 0)
    for stage, count in enumerate(counts):
        stages.append(
            StagePlan(
                stage=stage,
                pp_rank=stage % config.parallel.pp,
                chunk=stage // config.parallel.pp,
                first_layer=sum(counts[:stage]),
                num_layers=count,
                has_prologue=stage == 0,
                has_epilogue=stage == len(counts) - 1,
                input_shape=hidden if stage else (),
                recompute=modes(config.parallel.recompute, len(counts))[stage],
            )
        )
    return stages


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
