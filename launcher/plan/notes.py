"""What a reader of the plan should know although nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import isclose

from launcher.base.errors import JobError
from launcher.base.units import counted, format_bytes, format_duration
from launcher.contract.config import BatchConfig, TrainConfig
from launcher.contract.model.checkpoint import first_step, source_checkpoint
from launcher.contract.model.formats import format_of
from launcher.contract.plan import SchedulePlan
from launcher.contract.strategy import JobShape, Parallel, RankCost, Schedule
from launcher.plan.cost.memory import copies_checkpoints, states_of
from launcher.plan.cost.shapes import padded_vocabulary
from launcher.plan.cost.traffic import message_time_s
from launcher.plan.layout.balance import layer_costs, stage_sums
from launcher.plan.layout.batch import assumed_note
from launcher.plan.layout.partition import split_layers
from launcher.plan.rules.fusion import compile_note


def plan_notes(
    given: BatchConfig,
    job: JobShape,
    chosen: Schedule,
    schedule: SchedulePlan,
    costs: Sequence[Sequence[RankCost]],
) -> Iterator[str]:
    """All notes, each a sentence. ``given``: the batch sizes before they were solved."""
    if assumed := assumed_note(given):
        yield assumed
    yield from _beginning_note(job.config.train)
    yield from _setting_notes(job)
    yield from _microbatches_note(job, chosen)
    yield from _tensor_note(job, costs)
    if job.mesh.pp > 1 and job.model.num_tied_parameters:
        yield "The tied embedding has a copy on the first and on the last stage; their gradients are summed."
    yield from _cut_note(job)
    yield from _split_note(job, schedule)
    yield from _checkpoint_note(job, costs)
    yield from _export_note(job)
    yield from _disk_note(job, costs)
    if compiled := compile_note(job):
        yield compiled


def balance_note(job: JobShape, parallels: Sequence[Parallel]) -> str:
    """Says what splitting the layers by their time gains over splitting them evenly."""
    costs = layer_costs(job, parallels)
    counts = [stage.num_layers for stage in job.stages]
    slowest, even = (
        format_duration(max(stage_sums(costs, split)))
        for split in (counts, split_layers(len(costs), len(counts)))
    )
    how = "measured" if job.time_factors else "predicted"
    return (
        f"Layers are split by {how} time, embedding and head counted: the slowest stage takes {slowest} "
        f"per microbatch, {even} with the layers split evenly."
    )


def _beginning_note(train: TrainConfig) -> Iterator[str]:
    if (source := source_checkpoint(train)) is None:
        return
    done = first_step(train)
    what, then = "weights", "its optimizer is fresh, and it begins with step 1 of its data and learning rates"
    if done:
        what = "weights and the optimizer"
        then = f"it goes on with step {done + 1} of {train.num_steps} of its own data and learning rates"
    yield f"It begins with the {what} of {source.run_dir} after step {source.step}: {then}."


def _setting_notes(job: JobShape) -> Iterator[str]:
    """Settings whose effect is seldom what was meant."""
    cluster, device, model, tp = job.cluster.config, job.config.device, job.config.model, job.mesh.tp
    if cluster.device_name not in (None, device.name):
        yield (
            f"The cluster {cluster.name} is built of {cluster.device_name} devices, and the device is "
            f"{device.name}: figures are those of {device.name} on the links of {cluster.name}. Choose "
            "device and cluster that go together, or set cluster.device_name=null."
        )
    warmup_steps, num_steps = job.config.optim.warmup_steps, job.config.train.num_steps
    if warmup_steps >= num_steps:
        yield (
            f"The learning rate grows through all {counted(num_steps, 'step')} and never reaches optim.lr: "
            f"optim.warmup_steps is {warmup_steps}."
        )
    padded = padded_vocabulary(model, tp)
    if padded != model.vocab_size:
        yield (
            f"The vocabulary of {model.vocab_size} is padded to {padded}, a multiple of tp = {tp}; "
            "padding never receives probability."
        )


def _microbatches_note(job: JobShape, chosen: Schedule) -> Iterator[str]:
    p, v, m = job.pipeline.num_pp_ranks, job.pipeline.num_chunks, job.pipeline.num_microbatches
    filled = replace(job.pipeline, num_microbatches=p)
    bubble, least = (chosen.bubble_fraction(shape) for shape in (job.pipeline, filled))
    if m >= p or bubble is None or least is None or isclose(bubble, least):  # or no number would shrink it
        return
    share = f"{bubble:.0%}"
    if isclose(bubble, (p - 1) / (v * m + p - 1)):
        chunks = "" if v == 1 else f"{v} * "
        share = f"(pp - 1) / ({chunks}m + pp - 1) = {p - 1}/{v * m + p - 1} = {bubble:.0%}"
    filling = counted(m, "microbatch")
    yield f"{filling} cannot fill {p} pipeline ranks: the bubble is {share}; more would shrink it."


def _tensor_note(job: JobShape, costs: Sequence[Sequence[RankCost]]) -> Iterator[str]:
    if not job.cluster.crosses_nodes(job.mesh, "tp"):
        return
    config = job.cluster.config
    messages = [c for rank in costs for cost in rank for c in cost.collectives if c.axis == "tp"]
    across, inside = (
        sum(c.count * message_time_s(job, c, link) for c in messages) / len(costs)
        for link in (config.inter_node, config.intra_node)
    )
    yield (
        f"Tensor-parallel groups of {job.mesh.tp} cross nodes of {config.devices_per_node} devices: their "
        f"messages take {format_duration(across)} per step and rank, {format_duration(inside)} inside a node."
    )


def _checkpoint_note(job: JobShape, costs: Sequence[Sequence[RankCost]]) -> Iterator[str]:
    if not copies_checkpoints(job.config) or job.config.device.kind == "cpu":
        return  # on the CPU, the memory of the host is that of the ranks, and has it in its table
    states = [states_of(job, pp_rank, rank) for pp_rank, rank in enumerate(costs)]
    most = max(held.saved_bytes for held in states)
    first_node = range(min(job.mesh.num_ranks, job.cluster.config.devices_per_node))
    is_sharded = states[0].is_sharded  # else the first replica saves alone
    per_node = sum(is_sharded or job.mesh.coordinates(rank).dp == 0 for rank in first_node)
    yield (
        f"Checkpoints are written in the background from a copy in the memory of the host: at most "
        f"{format_bytes(most)} a rank, {format_bytes(most * per_node)} a node (train.async_checkpoint)."
    )


def _export_note(job: JobShape) -> Iterator[str]:
    if job.config.model.family == "custom":
        return
    try:
        format_of(job.config.model)
    except JobError as error:
        yield f"trireme export will write none of its checkpoints: {error}."


def _disk_note(job: JobShape, costs: Sequence[Sequence[RankCost]]) -> Iterator[str]:
    """What the checkpoints take that are kept for good, the number of which grows with the run."""
    train = job.config.train
    if not train.keep_every or not train.checkpoint_interval:
        return
    states = [states_of(job, pp_rank, rank) for pp_rank, rank in enumerate(costs)]
    copies = [job.mesh.tp * (job.mesh.dp if held.is_sharded else 1) for held in states]
    each = sum(held.saved_bytes * count for held, count in zip(states, copies, strict=True))
    number = num_kept(train)
    yield (
        f"At its end the run has {counted(number, 'checkpoint')} of at most {format_bytes(each)}: "
        f"{format_bytes(each * number)} on the disk, and one more while one is written "
        "(train.keep_every, train.keep_checkpoints)."
    )


def num_kept(train: TrainConfig) -> int:
    """How many checkpoints a run has at its end that was never stopped."""
    last_due = train.num_steps // train.checkpoint_interval * train.checkpoint_interval
    due = range(last_due, 0, -train.checkpoint_interval)
    saved = chain([train.num_steps] if train.num_steps != last_due else [], due)
    newest = islice(saved, train.keep_checkpoints)
    return train.num_steps // train.keep_every + sum(step % train.keep_every != 0 for step in newest)


def _cut_note(job: JobShape) -> Iterator[str]:
    if job.model.cut_at is None:
        return
    last = sum(not layer.has_backward for layer in job.model.layers) - 1
    layers = f"Layers 0 to {last} are" if last else "Layer 0 is"
    yield (
        f"{layers} not trained, though parameters there require a gradient: layer {job.model.cut_at} passes "
        "none on (a forward under no_grad, or a detached input)."
    )


def _split_note(job: JobShape, schedule: SchedulePlan) -> Iterator[str]:
    layers = job.model.layers
    num_whole = sum(not layer.weight_flops for layer in layers)
    if not (schedule.splits_backward and num_whole):
        return
    yield (
        f"{schedule.name} splits the backward, which {num_whole} of {len(layers)} layers cannot: their B "
        "computes the weight gradients, too, and their W nothing."
    )
