"""ZeRO through DeepSpeed: the replicas split the model states instead of each holding all of them.

    of every replica   stage 1               stage 2               stage 3
    optimizer state    its part              its part              its part
    gradients          all                   its part              its part
    weights            all                   all                   its part, gathered layer by layer
    messages           gradients reduced     gradients reduced     weights gathered twice and gradients
                       and weights gathered  per microbatch,       reduced per microbatch
                       once a step           weights gathered

Each stage of a pipeline, and each slice of tensor parallelism, is split over the replicas of its own.

Source: Rajbhandari et al., ZeRO (2020), sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from launcher.base import registry
from launcher.base.errors import left_out
from launcher.contract.config import DEFAULT_ARCHITECTURE, DEFAULT_SCHEDULE, LaunchConfig
from launcher.contract.optim.plugin import whole_tensor_faults
from launcher.contract.plan import Plan
from launcher.contract.strategy import (
    FP32_BYTES,
    Collective,
    Fault,
    JobShape,
    LayerShape,
    Parallel,
    RankCost,
    Schedule,
    Section,
)
from launcher_plugins.parallel.data.plan import buckets, loss_messages
from launcher_plugins.parallel.zero.deepspeed_json import deepspeed_json, option_faults
from launcher_plugins.parallel.zero.states import scratch_bytes, section, states_of

CONFIG_NAME = "deepspeed.json"
"""The file in the run directory that DeepSpeed is configured with."""


class ZeroParallel(Parallel):
    """Replicas that share the model states; in place of plain data parallelism."""

    axis = "dp"
    runtime = "launcher_plugins.parallel.zero.runtime.update:apply"
    update = "launcher_plugins.parallel.zero.runtime.update:update"
    replaces = ("data",)

    def applies(self, config: LaunchConfig) -> bool:
        """Where a stage is chosen."""
        return config.parallel.zero_stage > 0

    def settings_faults(self, config: LaunchConfig) -> Iterable[Fault]:
        """Settings that only DeepSpeed would read, where it does not make the update."""
        parallel = config.parallel
        if parallel.zero_stage:
            return
        rule = "has an effect only where DeepSpeed makes the update (parallel.zero_stage=1, 2 or 3)"
        if parallel.zero_offload:
            ways = ({"parallel.zero_stage": 1}, {"parallel.zero_offload": False})
            yield Fault("parallel.zero_offload", "true", rule, ways=ways)
        for key, value in parallel.zero_options.items():
            path = f"parallel.zero_options.{key}"
            yield left_out(path, value, rule)

    def check(self, job: JobShape) -> Iterable[Fault]:
        """What cannot be split, what DeepSpeed cannot do, and a user's keys that contradict the recipe."""
        yield from _shape_faults(job)
        yield from _precision_faults(job)
        yield from _compile_faults(job.config)
        yield from _alarm_faults(job.config)
        yield from _group_faults(job)
        why = "ZeRO splits all tensors of a rank in equal parts"
        yield from whole_tensor_faults(job.config, why, {"parallel.zero_stage": 0})
        if job.config.parallel.zero_offload and job.config.device.kind == "cpu":
            rule = "the devices are CPUs, so the optimizer state is in the memory of the CPU already"
            yield Fault("parallel.zero_offload", "true", rule, ways=({"parallel.zero_offload": False},))
        yield from option_faults(job.config, job.model.num_trained_parameters)

    def cost(self, job: JobShape, pp_rank: int) -> RankCost:
        """The messages that split states need, and what the update holds for a moment."""
        norm = Collective(
            operation="all_reduce", purpose="gradient norm", axis="dp", num_bytes=FP32_BYTES, count=2
        )
        sums = (*loss_messages(job, pp_rank), norm)
        collectives = (_gradients(job, pp_rank), *_weights(job, pp_rank), *sums)
        return RankCost(
            memory_bytes=_memory(job, pp_rank), states=states_of(job, pp_rank), collectives=collectives
        )

    def memory_ways(self, job: JobShape) -> Iterable[Mapping[str, Any]]:
        """The higher stages."""
        stages = range(job.config.parallel.zero_stage + 1, 4) if job.mesh.dp > 1 else ()
        return ({"parallel.zero_stage": stage} for stage in stages)

    def describe(self, job: JobShape) -> Iterable[Section]:
        """What each stage would leave on a rank, where replicas update what they hold."""
        if job.mesh.dp > 1 and all(role.trains for role in job.roles):
            yield section(job)

    def layout(self, plan: Plan) -> Iterable[str]:
        """The stage."""
        yield f"zero={plan.config.parallel.zero_stage}"

    def documents(self, job: JobShape) -> Mapping[str, Mapping[str, Any]]:
        """The DeepSpeed configuration."""
        return {CONFIG_NAME: deepspeed_json(job.config, job.model.num_trained_parameters)}


def _shape_faults(job: JobShape) -> Iterator[Fault]:
    stage = job.config.parallel.zero_stage
    if job.mesh.dp == 1:
        rule = "splits the model states over the data-parallel replicas, and there is one (parallel.dp=1)"
        yield Fault("parallel.zero_stage", stage, rule, ways=({"parallel.zero_stage": 0}, {"parallel.dp": 2}))
    yield from _pipeline_faults(job) if stage > 1 else ()
    if stage == 3 and any(part.recompute == "selective" for part in job.stages):
        rule = "ZeRO-3 frees the norm's weights before selective recomputation needs them"
        ways = ({"parallel.recompute": "full"}, {"parallel.recompute": "none"}, {"parallel.zero_stage": 2})
        yield Fault("parallel.recompute", job.config.parallel.recompute, rule, ways=ways)
    if job.config.architecture.name != DEFAULT_ARCHITECTURE:
        rule = f"the update is {job.config.architecture.name}'s own, and ZeRO would be a second one"
        yield Fault("parallel.zero_stage", stage, rule, ways=({"parallel.zero_stage": 0},))


def _pipeline_faults(job: JobShape) -> Iterator[Fault]:
    parallel, stages = job.config.parallel, job.pipeline.num_stages
    whole: dict[str, Any] = {"parallel.pp": 1} if parallel.pp > 1 else {}
    if parallel.num_chunks > 1:
        whole |= {"parallel.num_chunks": 1, "parallel.schedule": DEFAULT_SCHEDULE}
    if stages > 1:
        rule = (
            f"reduce-scatters gradients after every microbatch, and a pipeline of {stages} stages "
            "(pp * num_chunks) accumulates them over all of its microbatches"
        )
        ways = ({"parallel.zero_stage": 1}, whole)
        yield Fault("parallel.zero_stage", parallel.zero_stage, rule, ways=ways)
    elif registry.load(Schedule, parallel.schedule).splits_backward:
        late = f"{parallel.schedule} computes them after it"
        rule = f"reduce-scatters gradients during the backward, and {late}"
        ways = ({"parallel.zero_stage": 1}, {"parallel.schedule": DEFAULT_SCHEDULE})
        yield Fault("parallel.zero_stage", parallel.zero_stage, rule, ways=ways)


def _group_faults(job: JobShape) -> Iterator[Fault]:
    groups = job.config.optim.groups
    if groups and job.pipeline.num_pp_ranks > 1:
        rule = "DeepSpeed needs the same groups of parameters on every pipeline rank, and these are by name"
        ways = ({"parallel.zero_stage": 0}, {"parallel.pp": 1})
        label = next(iter(groups))
        yield Fault(f"optim.groups.{label}.names", [*groups[label].names], rule, ways=ways)


def _precision_faults(job: JobShape) -> Iterator[Fault]:
    precision, stage = job.config.precision, job.config.parallel.zero_stage
    if precision.compute == "fp16" and job.config.device.kind == "cpu":
        rule = "DeepSpeed has no fp16 on the CPU"
        formats = ({"precision.compute": "bf16"}, {"parallel.zero_stage": 0})
        yield Fault("parallel.zero_stage", stage, rule, ways=formats)
    if precision.compute != "fp32" and not precision.master_weights:
        rule = f"DeepSpeed keeps fp32 weights in the optimizer (parallel.zero_stage={stage})"
        ways = ({"precision.master_weights": True}, {"parallel.zero_stage": 0})
        yield Fault("precision.master_weights", "false", rule, ways=ways)
    if precision.compute != "fp32" and (number := job.model.num_fp32_parameters):
        rule = f"DeepSpeed holds all weights in one format, the model keeps {number} in fp32 (keep_in_fp32)"
        whole: dict[str, Any] = {"parallel.zero_stage": 0}
        yield Fault("parallel.zero_stage", stage, rule, ways=(whole, {"precision.compute": "fp32"}))


def _compile_faults(config: LaunchConfig) -> Iterator[Fault]:
    if config.parallel.zero_stage == 3 and config.fusion.compile != "none":
        rule = (
            "compiles whole layers, and DeepSpeed gathers the weights at parallel.zero_stage=3 inside of "
            "them, from hooks that cannot be compiled"
        )
        ways = ({"fusion.compile": "none"}, {"parallel.zero_stage": 2})
        yield Fault("fusion.compile", config.fusion.compile, rule, ways=ways)


def _alarm_faults(config: LaunchConfig) -> Iterator[Fault]:
    for name in config.alarms.takes_back:
        path, action = f"alarms.{name}", getattr(config.alarms, name)
        if action == "skip":
            rule = "leaves out the update of a step, and DeepSpeed clears gradients only as it updates"
            yield Fault(path, action, rule, ways=({path: "end"}, {path: "rewind"}))


def has_whole_fp32_gradients(job: JobShape) -> bool:
    """Whether DeepSpeed takes its bf16 optimizer, which sums all gradients in fp32 on every replica."""
    precision, parallel = job.config.precision, job.config.parallel
    is_mixed = precision.compute == "bf16" and precision.gradients == "fp32"
    return parallel.zero_stage == 1 and is_mixed and not parallel.zero_offload


def _gradients(job: JobShape, pp_rank: int) -> Collective:
    """All gradients in buckets: once a step, or from stage 2 on after every microbatch."""
    size, count = buckets(job, pp_rank)
    is_repeated = job.config.parallel.zero_stage > 1
    return Collective(
        operation="all_reduce" if has_whole_fp32_gradients(job) else "reduce_scatter",
        purpose="gradients",
        axis="dp",
        num_bytes=size,
        count=count * job.pipeline.num_microbatches if is_repeated else count,
        overlappable=is_repeated and job.config.device.kind == "cuda",
        phase="backward" if is_repeated else "step",
    )


def _weights(job: JobShape, pp_rank: int) -> Iterator[Collective]:
    """The updated weights once a step; at stage 3 instead those of each layer, for every forward and
    every backward, which a GPU computes beside."""
    gathered = partial(Collective, operation="all_gather", purpose="weights", axis="dp")
    if job.config.parallel.zero_stage < 3:
        yield gathered(num_bytes=job.num_trained_parameters(pp_rank) * job.compute_bytes)
        return
    count, is_hidden = job.pipeline.num_microbatches, job.config.device.kind == "cuda"
    for part, size in _part_bytes(job, pp_rank):
        yield gathered(num_bytes=size, count=count, overlappable=is_hidden, phase="forward")
        if part.has_backward:
            yield gathered(num_bytes=size, count=count, overlappable=is_hidden, phase="backward")


def _part_bytes(job: JobShape, pp_rank: int) -> Iterator[tuple[LayerShape, int]]:
    """Each layer, and each end of the model, with the bytes of its weights on one rank."""
    tied = job.model.num_tied_parameters
    for part in (part for stage in job.stages_of(pp_rank) for part, _ in job.parts(stage)):
        split = part.num_parameters - part.num_replicated_parameters
        if part is job.model.epilogue:
            split -= tied  # gathered with the embedding
        yield part, (part.num_replicated_parameters + -(-split // job.mesh.tp)) * job.compute_bytes


def _memory(job: JobShape, pp_rank: int) -> dict[str, int]:
    """What is held beside the states: the owned gradients in fp32 while the update runs, and buffers."""
    stage, dp = job.config.parallel.zero_stage, job.mesh.dp
    held = {"optimizer scratch": scratch_bytes(job, pp_rank)}
    if not (has_whole_fp32_gradients(job) or job.config.parallel.zero_offload):
        held["gradients of the update"] = -(-job.num_trained_parameters(pp_rank) // dp) * FP32_BYTES
    if stage > 1:
        held["gradient bucket"] = min(
            job.config.parallel.bucket_bytes, job.num_trained_parameters(pp_rank) * job.compute_bytes
        )
    if stage == 3:
        held["gathered weights"] = max(size for _, size in _part_bytes(job, pp_rank))
    return held
