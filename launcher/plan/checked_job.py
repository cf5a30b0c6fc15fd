"""From a configuration to the job that plugins judge: sizes solved, everything checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from launcher.base.errors import Fault, LauncherError
from launcher.base.units import counted
from launcher.contract.actions import PipelineShape
from launcher.contract.config import LaunchConfig
from launcher.contract.data.samples import own_data_faults
from launcher.contract.data.tokenizer import vocabulary_faults
from launcher.contract.mesh import AXES, Cluster, Mesh
from launcher.contract.model.shape import ModelShape
from launcher.contract.plan import BatchPlan
from launcher.contract.strategy import JobShape, RoleGroup
from launcher.plan.cost.measured import MeasuredRun, measured_faults, with_measured_times
from launcher.plan.cost.shapes import has_sizes, model_shape, padded_vocabulary, resolve_model
from launcher.plan.layout.balance import balanced_split, layer_costs
from launcher.plan.layout.batch import explained, length_faults, solve
from launcher.plan.layout.frozen import with_frozen
from launcher.plan.layout.partition import layer_faults, make_stages, recompute_faults
from launcher.plan.layout.world_size import rank_order_faults, solve_dp, world_faults
from launcher.plan.plugins import (
    Chosen,
    candidate_parallels,
    choose,
    parallel_faults,
    plugin_errors,
    plugin_faults,
)
from launcher.plan.rules.alarms import alarm_faults
from launcher.plan.rules.checks import config_faults
from launcher.plan.rules.fusion import fusion_faults
from launcher.plan.rules.groups import group_faults
from launcher.plan.rules.unread import unread_faults
from launcher.schedule.passes import schedule_faults
from launcher.typed.read import Source


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What a plan depends on beside its configuration, read before it is made."""

    shape: ModelShape | None = None
    """Of a user's own model, where `needs_measuring`."""
    num_samples: int | None = None
    """Of a user's own dataset; None where the plan does not see it."""
    num_token_ids: int | None = None
    """Of the tokenizer that the data name by its file; None where the plan does not see it."""
    measured: MeasuredRun | LauncherError | None = None
    """The run that `device.measured_in` names, or why it cannot be read; None where it names none."""


_UNSOLVED = BatchPlan(global_size=1, micro_size=1, num_microbatches=1, seq_length=1)


@dataclass(frozen=True, kw_only=True)
class CheckedJob:
    """A job that can run, as far as that is known before its memory is predicted."""

    shape: JobShape
    """What the ranks hold: the vocabulary is padded."""
    model: ModelShape
    """The model as it was asked for."""
    chosen: Chosen
    batch: BatchPlan


def examine(
    config: LaunchConfig, sources: Mapping[str, Source], inputs: PlanInputs
) -> CheckedJob | tuple[Fault, ...]:
    """The job with everything solved and checked, or every reason why there is none.

    Raises:
        PluginError: when a named plugin fails to load.
    """
    config = replace(config, model=resolve_model(config.model))
    unusable_plugins = plugin_faults(config, sources)
    early = _early_faults(config, sources, unusable_plugins)
    is_measured = config.model.family != "custom" or (inputs.shape is not None and not early)
    if unusable_plugins or not has_sizes(config.model) or not is_measured:
        # Without its plugins or its sizes a job cannot be formed; the rest can still be judged.
        _, _, late = _solve(config, config.model.num_layers, (), sources)
        return (*early, *late)
    model = _shape(config, inputs.shape)
    padded = replace(config.model, vocab_size=padded_vocabulary(config.model, config.parallel.tp))
    held = _shape(replace(config, model=padded), inputs.shape)
    others = _other_roles(config, held)
    dp, sizes, late = _solve(config, len(held.layers), others, sources)
    job = _job(config, dp or 1, sizes or _UNSOLVED, held)
    chosen = choose(job.config)
    if dp and sizes:  # what is read by these is known only now
        known = {fault.path for fault in early}
        unread = unread_faults(job.config, sources, chosen.architecture.roles(job))
        late += [fault for fault in unread if fault.path not in known]
    late += [*recompute_faults(job, sources), *measured_faults(job, inputs.measured), *_training_faults(job)]
    verdicts = [*fusion_faults(job.config, chosen.schedule), *(parallel_faults(job.config) if dp else ())]
    verdicts += _plugin_verdicts(job, chosen, is_sound=not (early or late))
    if sizes:
        rules = [*schedule_faults(chosen.schedule, job.pipeline), *length_faults(job.pipeline, config.batch)]
        verdicts += [explained(fault, config, sizes, sources) for fault in rules]
        num_samples = inputs.num_samples
        verdicts += [] if num_samples is None else own_data_faults(config, sizes, num_samples)
        verdicts += vocabulary_faults(config.model.vocab_size, inputs.num_token_ids)
        verdicts += _microbatch_faults(model, config.model.target, sizes)
    if sizes is None or early or late or verdicts:
        return (*early, *late, *verdicts)
    job = with_measured_times(job, inputs.measured)
    shape = replace(_balanced(job, chosen), roles=tuple(chosen.architecture.roles(job)))
    return CheckedJob(shape=shape, model=model, chosen=chosen, batch=sizes)


def needs_measuring(config: LaunchConfig, sources: Mapping[str, Source]) -> bool:
    """Whether a plan needs what is measured of a user's own model or data: not where the configuration is
    refused for what is seen without it.

    Raises:
        PluginError: when a named plugin fails to load.
    """
    has_own = config.model.family == "custom" or config.data.target is not None
    if not has_own or not has_sizes(resolve_model(config.model)):
        return False
    with plugin_errors():
        return not _early_faults(config, sources, plugin_faults(config, sources))


def _early_faults(
    config: LaunchConfig, sources: Mapping[str, Source], unusable_plugins: Sequence[Fault]
) -> list[Fault]:
    """What is wrong whatever the layout."""
    settings = (found.settings_faults(config) for found in candidate_parallels(config).values())
    faults = [
        *config_faults(config, sources),
        *chain.from_iterable(settings),
        *rank_order_faults(config.parallel.rank_order),
        *unusable_plugins,
    ]
    unread = unread_faults(config, sources)
    paths = {fault.path for fault in unread}  # what is not read need not be right
    return [*(fault for fault in faults if fault.path not in paths), *unread]


def _balanced(job: JobShape, chosen: Chosen) -> JobShape:
    """A sound job with the layers on the stages by their time, where that is asked for."""
    parallel = job.config.parallel
    if parallel.layers_per_stage != "auto":
        return job
    split = balanced_split(layer_costs(job, chosen.parallels), job.pipeline.num_stages)
    config = replace(job.config, parallel=replace(parallel, layers_per_stage=split))
    return _with_stages(replace(job, config=config))


def _with_stages(job: JobShape) -> JobShape:
    """The job with the layers on the stages as its configuration splits them."""
    parallel = job.config.parallel
    stages = make_stages(job.model, job.pipeline, parallel.layers_per_stage, parallel.recompute)
    num_frozen = sum(stage.is_frozen for stage in stages)
    return replace(job, stages=stages, pipeline=replace(job.pipeline, num_frozen=num_frozen))


def _training_faults(job: JobShape) -> list[Fault]:
    """Says that nothing of a user's own model is trained."""
    if job.model.num_trained_parameters:
        return []
    if frozen := [label for label, group in job.config.optim.groups.items() if group.frozen]:
        rule = "leaves nothing to train: no other parameter gets a gradient"
        fix = "Leave some parameter out of what is frozen."
        return [Fault(f"optim.groups.{frozen[-1]}.frozen", "true", rule, fix)]
    counted_layers = counted(len(job.model.layers), "layer")
    rule = f"there is nothing to train: no parameter of its {counted_layers} gets a gradient"
    fix = "Let at least one have requires_grad, behind every layer whose forward is under no_grad."
    return [Fault("model.target", job.config.model.target, rule, fix)]


def _microbatch_faults(model: ModelShape, target: str | None, sizes: BatchPlan) -> Iterator[Fault]:
    """Says that a layer of a user's own cannot take a microbatch of several samples."""
    if model.single_sample is not None and sizes.micro_size > 1:
        rule = f"of the model {target} {model.single_sample}"
        yield Fault("batch.micro_size", sizes.micro_size, rule, ways=({"batch.micro_size": 1},))


def _solve(
    config: LaunchConfig, num_layers: int | None, others: Sequence[RoleGroup], sources: Mapping[str, Source]
) -> tuple[int | None, BatchPlan | None, list[Fault]]:
    """Replicas and batch sizes, None where they have none, and the faults of world, batch and layers."""
    dp = solve_dp(config, others, sources)
    sizes = dp if isinstance(dp, Fault) else solve(config.batch, dp, sources)
    faults: list[Fault] = []
    if not isinstance(dp, Fault):
        faults += world_faults(config, dp, others, sources)
    if isinstance(sizes, Fault):
        faults.append(sizes)
    if num_layers is not None:
        split = config.parallel.layers_per_stage
        faults += layer_faults(num_layers, _pipeline(config, _UNSOLVED), split, sources)
    return (
        None if isinstance(dp, Fault) else dp,
        None if isinstance(sizes, Fault) else sizes,
        faults,
    )


def _plugin_verdicts(job: JobShape, chosen: Chosen, *, is_sound: bool) -> list[Fault]:
    """What the parallels find; the architecture judges a sound job alone. The executor is not asked:
    what it cannot start can still be planned."""
    faults = [*group_faults(job.config.optim, job.model), *chosen.optimizer.check(job.config, job.model)]
    faults += [fault for parallel in chosen.parallels for fault in parallel.check(job)]
    if is_sound and not faults:
        faults += chosen.architecture.check(job)
        faults += alarm_faults(job, chosen.architecture)
    return faults


def _shape(config: LaunchConfig, measured: ModelShape | None) -> ModelShape:
    return with_frozen(_built_shape(config, measured), config.optim)


def _built_shape(config: LaunchConfig, measured: ModelShape | None) -> ModelShape:
    if config.model.family != "custom":
        is_fused = config.device.kind == "cuda"
        keeps_scores = config.fusion.attention == "plain"
        length = config.batch.seq_length
        return model_shape(config.model, length, has_fused_norm=is_fused, keeps_scores=keeps_scores)
    assert measured is not None, "a job is formed of a model whose shape is known"
    return measured


def _other_roles(config: LaunchConfig, model: ModelShape) -> tuple[RoleGroup, ...]:
    """Roles that the architecture puts on the devices beside the trainers, asked with one replica where dp
    is open."""
    dp = 1 if config.parallel.dp == "auto" else config.parallel.dp
    draft = _job(config, dp, _UNSOLVED, model)
    others = (role for role in choose(draft.config).architecture.roles(draft) if not role.trains)
    return tuple(role for role in others if role.name not in config.site.roles)


def _job(config: LaunchConfig, dp: int, sizes: BatchPlan, model: ModelShape) -> JobShape:
    """The job of a configuration with these sizes in place of every ``auto`` and missing one."""
    parallel = config.parallel
    batch = replace(
        config.batch,
        global_size=sizes.global_size,
        micro_size=sizes.micro_size,
        num_microbatches=sizes.num_microbatches,
    )
    order = AXES if rank_order_faults(parallel.rank_order) else tuple(parallel.rank_order.split("-"))
    pipeline = _pipeline(config, sizes)
    is_split = not layer_faults(len(model.layers), pipeline, parallel.layers_per_stage)
    job = JobShape(
        config=replace(config, parallel=replace(parallel, dp=dp), batch=batch),
        cluster=Cluster(config=config.cluster),
        mesh=Mesh(pp=parallel.pp, dp=dp, tp=parallel.tp, order=order),
        model=model,
        pipeline=pipeline,
        stages=(),
        micro_size=sizes.micro_size,
        global_size=sizes.global_size,
    )
    return _with_stages(job) if is_split else job


def _pipeline(config: LaunchConfig, sizes: BatchPlan) -> PipelineShape:
    return PipelineShape(
        num_pp_ranks=config.parallel.pp,
        num_chunks=config.parallel.num_chunks,
        num_microbatches=sizes.num_microbatches,
    )
