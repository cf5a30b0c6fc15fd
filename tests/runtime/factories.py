"""Small configurations, plans and contexts, built by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from launcher.config.schema import (
    BatchConfig,
    ClusterConfig,
    DataConfig,
    DeviceConfig,
    LaunchConfig,
    LinkConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PluginChoice,
    PrecisionConfig,
    ReportConfig,
    RunConfig,
    TrainConfig,
)
from launcher.plan.model import VERSION, BatchPlan, Plan, RankPlan, RolePlan, SchedulePlan, StagePlan
from launcher.runtime.api import DTYPES, RankContext
from launcher.runtime.groups import Group, Groups, make_groups
from launcher.runtime.layers import WholeLayers
from launcher.runtime.metrics import Clock
from launcher.runtime.split_backward import SplitBackward
from launcher.topology.mesh import Mesh

CPU = torch.device("cpu")
WHOLE = SplitBackward(is_enabled=False)


def make_config(**sections: dict[str, Any]) -> LaunchConfig:
    """A tiny GPT on one rank; each keyword replaces some settings of a section: ``model={...}``."""
    config = _default_config()
    changed = {name: replace(getattr(config, name), **values) for name, values in sections.items()}
    return replace(config, **changed)


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
            )
        )
    return stages


def _default_config() -> LaunchConfig:
    link = LinkConfig(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    return LaunchConfig(
        name="test",
        seed=7,
        model=ModelConfig(
            name="test",
            family="gpt",
            num_layers=2,
            hidden_size=16,
            num_heads=4,
            num_kv_heads=None,
            ffn_size=None,
            vocab_size=37,
            tied_embeddings=True,
            dropout=0.0,
            norm_eps=1e-5,
            rope_theta=10000.0,
            init_std=0.3,
            target=None,
            options={},
        ),
        data=DataConfig(
            name="text",
            source=None,
            tokenizer="bytes",
            eval_fraction=0.1,
            prefetch_batches=0,
            cache_dir=None,
            target=None,
            options={},
        ),
        batch=BatchConfig(global_size=None, micro_size=2, num_microbatches=1, seq_length=6),
        optim=OptimConfig(
            name="adamw",
            lr=1e-3,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            clip_norm=1.0,
            warmup_steps=2,
            decay="cosine",
            min_lr_fraction=0.1,
        ),
        train=TrainConfig(
            num_steps=4, eval_interval=0, eval_batches=0, checkpoint_interval=0, keep_checkpoints=1
        ),
        precision=PrecisionConfig(name="fp32", compute="fp32", gradients="fp32", master_weights=True),
        device=DeviceConfig(
            name="cpu",
            kind="cpu",
            peak_flops={"fp32": 1e9},
            memory_bytes=1 << 30,
            memory_bandwidth_bytes_per_s=1e9,
            attainable_fraction=1.0,
        ),
        cluster=ClusterConfig(
            name="local",
            nodes=1,
            devices_per_node=8,
            intra_node=link,
            inter_node=link,
            allow_idle_devices=True,
        ),
        parallel=ParallelConfig(
            dp=1,
            tp=1,
            pp=1,
            num_chunks=1,
            schedule="1f1b",
            schedule_options={},
            layers_per_stage="even",
            sequence_parallel=False,
            recompute="none",
            zero_stage=0,
            rank_order="pp-dp-tp",
            bucket_bytes=1 << 20,
        ),
        architecture=PluginChoice(name="decentralized", options={}),
        executor=PluginChoice(name="torchrun", options={}),
        report=ReportConfig(baseline="none", warmup_steps=0),
        run=RunConfig(dir=None, root="runs", timeout_s=30.0),
    )
