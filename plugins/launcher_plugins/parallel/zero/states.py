"""What the stages of ZeRO leave of the model states on every replica."""

from __future__ import annotations

from dataclasses import replace

from launcher.base.columns import columns
from launcher.base.units import format_bytes
from launcher.contract.config import PrecisionConfig
from launcher.contract.strategy import DTYPE_BYTES, FP32_BYTES, JobShape, ModelStates, Section

NUM_STAGES = 4
NAME = "zero"
"""Name of the plugin."""


def split_states(
    num_parameters: int,
    precision: PrecisionConfig,
    dp: int,
    stage: int,
    num_frozen: int = 0,
    states_per_parameter: int = 2,
) -> ModelStates:
    """The model states on one of ``dp`` replicas from stage 1 on. The optimizer always has fp32 weights.

    ``num_frozen``: parameters that are not trained; weights that are not split are saved by one replica.
    ``states_per_parameter``: what the optimizer keeps beside them, as of AdamW two moments.

    7.5 billion parameters over 64 replicas, 16-bit weights and gradients: 31.4, 16.6 and 1.9 GB.
    Source: Rajbhandari et al., ZeRO (2020), table 1.

    >>> mixed = PrecisionConfig(name="fp16", compute="fp16", gradients="fp16", master_weights=True)
    >>> states = [split_states(7_500_000_000, mixed, 64, stage) for stage in (1, 2, 3)]
    >>> [round(held.total_bytes / 1e9, 1) for held in states]
    [31.4, 16.6, 1.9]
    """

    def held(number: int, *, is_split: bool) -> int:
        return -(-number // dp) if is_split else number

    num_trained, weight_bytes = num_parameters - num_frozen, DTYPE_BYTES[precision.compute]
    optimizer = held(num_trained, is_split=True) * (1 + states_per_parameter) * FP32_BYTES
    return ModelStates(
        weights_bytes=held(num_parameters, is_split=stage >= 3) * weight_bytes,
        gradients_bytes=held(num_trained, is_split=stage >= 2) * DTYPE_BYTES[precision.gradients],
        optimizer_bytes=optimizer,
        saved_bytes=optimizer + held(num_frozen, is_split=stage >= 3) * weight_bytes,
        is_sharded=True,
    )


def states_of(job: JobShape, pp_rank: int) -> ModelStates:
    """The model states on the device of such a rank."""
    found = _at_stage(job, pp_rank, job.config.parallel.zero_stage)
    return replace(found, optimizer_bytes=0) if job.config.parallel.zero_offload else found


def scratch_bytes(job: JobShape, pp_rank: int) -> int:
    """What the optimizer makes beside its state while it runs, of all weights of a rank in one tensor."""
    if job.config.parallel.zero_offload:
        return 0
    part = -(-job.num_trained_parameters(pp_rank) // job.mesh.dp)
    return job.optimizer.scratch_elements(job.optimizer.kernel(job.config), part, part) * FP32_BYTES


def section(job: JobShape) -> Section:
    """The model states under each stage, on the rank that holds most of them; each rank's are its values."""
    ranks = [
        [_at_stage(job, pp_rank, stage).total_bytes for stage in range(NUM_STAGES)]
        for pp_rank in range(job.mesh.pp)
    ]
    sizes = [max(sizes) for sizes in zip(*ranks, strict=True)]
    stages = ["parallel.zero_stage", *map(str, range(NUM_STAGES))]
    chosen = f"this plan: parallel.zero_stage={job.config.parallel.zero_stage}, over dp = {job.mesh.dp}"
    return Section(
        plugin=NAME,
        title="Model states per rank by ZeRO stage",
        lines=(*columns([stages, ["bytes", *map(format_bytes, sizes)]]), chosen),
        values={"states_bytes": ranks},
        about="memory",
    )


def _at_stage(job: JobShape, pp_rank: int, stage: int) -> ModelStates:
    if stage == 0:
        return job.unsharded_states(pp_rank)
    number = job.num_local_parameters(pp_rank)
    num_frozen = number - job.num_trained_parameters(pp_rank)
    each, precision = job.states_per_parameter, job.config.precision
    return split_states(number, precision, job.mesh.dp, stage, num_frozen, each)
