"""From a configuration to the job that plugins judge: sizes solved, everything checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from launcher.base.errors import Fault
from launcher.contract.actions import PipelineShape
from launcher.contract.cluster import Cluster
from launcher.contract.config import BatchConfig, LaunchConfig, ModelConfig
from launcher.contract.mesh import AXES, Mesh
from launcher.contract.plan import ModelShape
from launcher.contract.strategy import JobShape, RoleGroup
from launcher.plan.cost.measured import MeasuredRun, ReadRun, measured_faults, with_measured_times
from launcher.plan.cost.shapes import has_sizes, model_shape
from launcher.plan.layout.balance import balanced_split, layer_costs
from launcher.plan.layout.batch import BatchSizes, solve
from launcher.plan.layout.microbatches import explained, length_faults
from launcher.plan.layout.partition import layer_faults, make_stages, recompute_faults
from launcher.plan.layout.resolve import padded_vocabulary, resolve, resolve_model
from launcher.plan.layout.world_size import axes, rank_order_faults, solve_dp, world_faults
from launcher.plan.plugins import Chosen, choose, plugin_faults
from launcher.plan.rules.checks import config_faults
from launcher.plan.rules.fusion import fusion_faults
from launcher.schedule.passes import schedule_faults
from launcher.typed.read import Source

Describe = Callable[[ModelConfig, BatchConfig], ModelShape]
"""Measures the shape of a user's own model."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """What a plan has to ask outside of its configuration."""

    describe: Describe
    read_run: ReadRun


_UNSOLVED = BatchSizes(global_size=1, micro_size=1, num_microbatches=1)


@dataclass(frozen=True, kw_only=True)
class CheckedJob:
    """A job that can run, as far as that is known before its memory is predicted."""

    shape: JobShape
    """What the ranks hold: the vocabulary is padded."""
    model: ModelShape
    """The model as it was asked for."""
    chosen: Chosen
    batch: BatchSizes


def examine(
    config: LaunchConfig, sources: Mapping[str, Source], probes: Probes
) -> CheckedJob | tuple[Fault, ...]:
    """The job with everything solved and checked, or every reason why there is none.

    Raises:
        PluginError: when a named plugin fails to load.
    """
    config = replace(config, model=resolve_model(config.model))
    early = [*config_faults(config, sources), *rank_order_faults(config.parallel.rank_order)]
    unusable_plugins = plugin_faults(config, sources)
    early += unusable_plugins
    if unusable_plugins or not has_sizes(config.model) or (early and config.model.family == "custom"):
        # Without its plugins or its sizes a job cannot be formed; the rest can still be judged.
        _, _, late = _solve(config, config.model.num_layers, (), sources)
        return (*early, *late)
    model = _shape(config, probes.describe)
    padded = replace(config.model, vocab_size=padded_vocabulary(config.model, config.parallel.tp))
    held = _shape(replace(config, model=padded), lambda *_: model)
    others = _other_roles(config, held)
    dp, sizes, late = _solve(config, len(held.layers), others, sources)
    solved = resolve(config, dp or 1, sizes or _UNSOLVED)
    chosen = choose(solved)
    job = _job(solved, held)
    late += [*recompute_faults(job, sources), *measured_faults(job, probes.read_run)]
    verdicts = [*fusion_faults(solved, chosen.schedule)]
    verdicts += _plugin_verdicts(job, chosen, is_sound=not (early or late))
    if sizes:
        rules = [*schedule_faults(chosen.schedule, job.pipeline), *length_faults(job.pipeline, config.batch)]
        verdicts += [explained(fault, config, sizes, sources) for fault in rules]
    if sizes is None or early or late or verdicts:
        return (*early, *late, *verdicts)
    job = with_measured_times(job, probes.read_run)
    shape = replace(_balanced(job, chosen), roles=tuple(chosen.architecture.roles(job)))
    return CheckedJob(shape=shape, model=model, chosen=chosen, batch=sizes)


def _balanced(job: JobShape, chosen: Chosen) -> JobShape:
    """A sound job with the layers on the stages by their time, where that is asked for."""
    parallel = job.config.parallel
    if parallel.layers_per_stage != "auto":
        return job
    split = balanced_split(layer_costs(job, chosen.parallels), job.pipeline.num_stages)
    return replace(
        job,
        config=replace(job.config, parallel=replace(parallel, layers_per_stage=split)),
        stages=make_stages(job.model, job.pipeline, split, parallel.recompute),
    )


def asked_once(describe: Describe | None, read_run: ReadRun | None) -> Probes:
    """Asks a single time: ways out differ in their layout alone, and an answer takes seconds."""
    answers: list[ModelShape] = []

    @cache
    def read(path: str) -> MeasuredRun:
        assert read_run is not None, "whoever plans with device.measured_in gives a way to read it"
        return read_run(path)

    def measure(model: ModelConfig, batch: BatchConfig) -> ModelShape:
        assert describe is not None, "whoever plans a model of family custom gives a way to measure it"
        if not answers:
            answers.append(describe(model, batch))
        return answers[0]

    return Probes(describe=measure, read_run=read)


def _solve(
    config: LaunchConfig, num_layers: int | None, others: Sequence[RoleGroup], sources: Mapping[str, Source]
) -> tuple[int | None, BatchSizes | None, list[Fault]]:
    """Replicas and batch sizes, None where they have none, and the faults of world, batch and layers."""
    faults: list[Fault] = []
    dp = solve_dp(config, others, sources)
    sizes: BatchSizes | None = None
    if isinstance(dp, Fault):
        faults.append(dp)
    else:
        faults += world_faults(config, dp, others, sources)
        solution = solve(config.batch, dp, sources)
        if isinstance(solution, Fault):
            faults.append(solution)
        else:
            sizes = solution
    if num_layers is not None:
        split = config.parallel.layers_per_stage
        faults += layer_faults(num_layers, _pipeline(config, _UNSOLVED), split, sources)
    return (None if isinstance(dp, Fault) else dp), sizes, faults


def _plugin_verdicts(job: JobShape, chosen: Chosen, *, is_sound: bool) -> list[Fault]:
    """What the parallels find; the architecture judges a sound job alone. The executor is not asked:
    what it cannot start can still be planned."""
    faults = [fault for parallel in chosen.parallels for fault in parallel.check(job)]
    if is_sound and not faults:
        faults += chosen.architecture.check(job)
    return faults


def _shape(config: LaunchConfig, describe: Describe) -> ModelShape:
    if config.model.family != "custom":
        is_fused = config.device.kind == "cuda"
        keeps_scores = config.fusion.attention == "plain"
        length = config.batch.seq_length
        return model_shape(config.model, length, has_fused_norm=is_fused, keeps_scores=keeps_scores)
    return describe(config.model, config.batch)


def _other_roles(config: LaunchConfig, model: ModelShape) -> tuple[RoleGroup, ...]:
    """Roles that the architecture puts on the devices beside the trainers, asked with one replica where dp
    is open."""
    dp = 1 if config.parallel.dp == "auto" else config.parallel.dp
    draft = resolve(config, dp, _UNSOLVED)
    architecture = choose(draft).architecture
    others = (role for role in architecture.roles(_job(draft, model)) if not role.trains)
    return tuple(role for role in others if role.name not in config.site.roles)


def _job(config: LaunchConfig, model: ModelShape) -> JobShape:
    """The job of a configuration whose sizes are all known."""
    parallel, batch = config.parallel, config.batch
    micro, count, total = batch.micro_size, batch.num_microbatches, batch.global_size
    assert micro is not None, "the micro size is solved before the job is formed"
    assert count is not None, "the number of microbatches is solved before the job is formed"
    assert total is not None, "the global size is solved before the job is formed"
    assert parallel.dp != "auto", "dp is solved before the job is formed"
    order = AXES if rank_order_faults(parallel.rank_order) else axes(parallel.rank_order)
    pipeline = _pipeline(config, BatchSizes(global_size=total, micro_size=micro, num_microbatches=count))
    is_split = not layer_faults(len(model.layers), pipeline, parallel.layers_per_stage)
    return JobShape(
        config=config,
        cluster=Cluster(config=config.cluster, device=config.device),
        mesh=Mesh(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp, order=order),
        model=model,
        pipeline=pipeline,
        stages=make_stages(model, pipeline, parallel.layers_per_stage, parallel.recompute)
        if is_split
        else (),
        micro_size=micro,
        global_size=total,
    )


def _pipeline(config: LaunchConfig, sizes: BatchSizes) -> PipelineShape:
    return PipelineShape(
        num_pp_ranks=config.parallel.pp,
        num_chunks=config.parallel.num_chunks,
        num_microbatches=sizes.num_microbatches,
    )
