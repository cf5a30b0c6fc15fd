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


def split_states(num_parameters: int, precision: PrecisionConfig, dp: int, stage: int) -> ModelStates:
    """The model states on one of ``dp`` replicas from stage 1 on. The optimizer always has fp32 weights.

    7.5 billion parameters over 64 replicas, 16-bit weights and gradients: 31.4, 16.6 and 1.9 GB.
    Source: Rajbhandari et al., ZeRO (2020), table 1.

    >>> mixed = PrecisionConfig(name="fp16", compute="fp16", gradients="fp16", master_weights=True)
    >>> states = [split_states(7_500_000_000, mixed, 64, stage) for stage in (1, 2, 3)]
    >>> [round(held.total_bytes / 1e9, 1) for held in states]
    [31.4, 16.6, 1.9]
    """
    part = -(-num_parameters // dp)
    optimizer = part * 3 * FP32_BYTES
    return ModelStates(
        weights_bytes=(part if stage >= 3 else num_parameters) * DTYPE_BYTES[precision.compute],
        gradients_bytes=(part if stage >= 2 else num_parameters) * DTYPE_BYTES[precision.gradients],
        optimizer_bytes=optimizer,
        saved_bytes=optimizer,
        is_sharded=True,
    )


def states_of(job: JobShape, pp_rank: int) -> ModelStates:
    """The model states on the device of such a rank."""
    found = _at_stage(job, pp_rank, job.config.parallel.zero_stage)
    return replace(found, optimizer_bytes=0) if job.config.parallel.zero_offload else found


def scratch_bytes(job: JobShape, pp_rank: int) -> int:
    """What the optimizer makes beside its state while it runs, of all weights of a rank in one tensor: their
    denominators (``foreach``), or twice those (``loop``)."""
    kernels = job.config.fusion.optimizer
    if kernels == "fused" or job.config.parallel.zero_offload:
        return 0
    part = -(-job.num_local_parameters(pp_rank) // job.mesh.dp)
    return part * FP32_BYTES * (2 if kernels == "loop" else 1)


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
    return split_states(job.num_local_parameters(pp_rank), job.config.precision, job.mesh.dp, stage)
