"""Plans by hand, without the planner: a plan says what its test says, and predicts nothing.

`launcher.plan.build.build` plans one of `configs.launch_config`, the fixture ``make_plan`` a recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from launcher.contract.config import LaunchConfig
from launcher.contract.mesh import Mesh
from launcher.contract.plan import VERSION, BatchPlan, Plan, RolePlan, SchedulePlan, StagePlan
from launcher.plan.layout.partition import modes


def bare_plan(config: LaunchConfig, **fields: Any) -> Plan:
    """A plan on the mesh of a configuration without stages; ``fields`` replaces fields of the plan."""
    parallel, batch = config.parallel, config.batch
    assert isinstance(parallel.dp, int), "tests give dp as a number"
    mesh = Mesh(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp)
    micro, num = batch.micro_size or 1, batch.num_microbatches or 1
    plan = Plan(
        version=VERSION,
        config=config,
        mesh=mesh,
        roles=(RolePlan(name="trainer", first_rank=0, num_ranks=mesh.num_ranks, trains=True),),
        batch=BatchPlan(
            global_size=micro * num * mesh.dp,
            micro_size=micro,
            num_microbatches=num,
            seq_length=batch.seq_length,
        ),
        stages=(),
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
    return replace(plan, **fields)


def staged_plan(config: LaunchConfig, layers_per_stage: Sequence[int] | None = None) -> Plan:
    """A plan with the stages that the runtime builds; of all layers in one unless told otherwise."""
    return bare_plan(config, stages=_stages(config, layers_per_stage or [config.model.num_layers or 0]))


def _stages(config: LaunchConfig, counts: Sequence[int]) -> tuple[StagePlan, ...]:
    hidden = (config.batch.seq_length, config.model.hidden_size or 0)
    recompute = modes(config.parallel.recompute, len(counts))
    return tuple(
        StagePlan(
            stage=stage,
            pp_rank=stage % config.parallel.pp,
            chunk=stage // config.parallel.pp,
            first_layer=sum(counts[:stage]),
            num_layers=count,
            has_prologue=stage == 0,
            has_epilogue=stage == len(counts) - 1,
            input_shape=hidden if stage else (),
            recompute=recompute[stage],
        )
        for stage, count in enumerate(counts)
    )
