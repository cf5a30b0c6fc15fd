"""Predicted seconds of one microbatch on one layer: matmuls at the device's rate, the rest at its memory's.

A matmul takes its operations over (peak * attainable_fraction) or, when its microbatch is small, the
time that its weights take to be read. Norms, activations, residual sums and the like hardly compute:
they move tensors, and take the bytes they move over the bandwidth of the memory. Counted are the
tensors that the layer keeps for its backward:

    forward    writes each of them, and reads it in the operation that follows           2 passes
    backward   reads each of them, writes its gradient and reads that                    3 passes
               adds the gradients of the weights to those of the microbatches before     2 passes

Full recomputation of a layer takes its forward again; selective, the writing and reading of what it does
not keep, and the matmuls of an attention that is not one kernel.

Not counted is the start of an operation, 5 to 10 microseconds each on a GPU. Layers whose forward is
predicted below `SHORT_LAYER_S` mostly wait for that, and take up to ten times as long.

Where a run measured its stages (`measured`), the times of a layer's kind are multiplied by what it found.

Source: Williams et al., Roofline (2009), for the two rates; Ivanov et al., Data Movement Is All You
Need (2021), table 1: operations other than matmuls take 39 % of a BERT layer's time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.contract.config import Recompute
from launcher.contract.strategy import JobShape, LayerKind, LayerShape
from launcher.plan.cost.memory import again_bytes, part_bytes
from launcher.plan.cost.shapes import backward_flops

SHORT_LAYER_S = 1e-3
"""Forward of a layer and microbatch below which a predicted time is only a lower bound."""
_FORWARD_PASSES = 2
_BACKWARD_PASSES = 3
_GRADIENT_PASSES = 2


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Seconds of one microbatch on one rank."""

    forward_s: float
    backward_s: float
    """The whole backward."""
    weight_s: float
    """Of it, what a split backward leaves to the weight gradients."""


def part_times(job: JobShape, part: LayerShape, recompute: Recompute) -> PartTimes:
    """The times of one layer, or of the embedding or the head; what it computes again is in its backward."""
    device, tp = job.config.device, job.mesh.tp
    flops_per_s = device.peak_flops[job.config.precision.products] * device.attainable_fraction
    has_matmul = part.forward_flops > 0
    parameter_s = 1 / tp / device.memory_bandwidth_bytes_per_s
    kept = part_bytes(job, part, is_held=recompute != "full")
    once = times(
        matmul_s=part.forward_flops * job.micro_size / tp / flops_per_s,
        weights_s=part.num_parameters * parameter_s * job.compute_bytes if has_matmul else 0.0,
        kept_s=kept / device.memory_bandwidth_bytes_per_s,
        gradients_s=part.num_trained_parameters * parameter_s * job.gradient_bytes,
        backward_share=backward_flops(part) / part.forward_flops if has_matmul else 0.0,
        weight_share=part.weight_flops / part.forward_flops if has_matmul else 0.0,
    )
    again_s = 0.0
    if recompute == "full" and part.has_backward:
        again_s = once.forward_s
    elif recompute == "selective":
        again_s = _FORWARD_PASSES * again_bytes(job, part) / device.memory_bandwidth_bytes_per_s
        again_s += (part.selective or part).again_flops * job.micro_size / tp / flops_per_s
    forward, backward = job.time_factors[kind_of(part, recompute)] if job.time_factors else (1.0, 1.0)
    return PartTimes(
        forward_s=once.forward_s * forward,
        backward_s=(once.backward_s + again_s) * backward,
        weight_s=once.weight_s * backward,
    )


def kind_of(part: LayerShape, recompute: Recompute) -> LayerKind:
    """What a layer has in common with those that take as long."""
    return replace(part, name=""), recompute


def times(
    *,
    matmul_s: float,
    weights_s: float,
    kept_s: float,
    gradients_s: float,
    backward_share: float = 2.0,
    weight_share: float,
) -> PartTimes:
    """The times of a layer from the seconds that its parts take once.

    ``backward_share``, ``weight_share``: the operations of the backward, and of them those of deferred weight
    gradients, each over those of the forward.

    >>> times(matmul_s=4.0, weights_s=1.0, kept_s=0.5, gradients_s=0.25, weight_share=0.75)
    PartTimes(forward_s=5.0, backward_s=10.0, weight_s=3.5)
    """
    once_s = max(matmul_s, weights_s)
    adding_s = _GRADIENT_PASSES * gradients_s
    return PartTimes(
        forward_s=once_s + _FORWARD_PASSES * kept_s,
        backward_s=backward_share * once_s + _BACKWARD_PASSES * kept_s + adding_s,
        weight_s=weight_share * once_s + adding_s if weight_share else 0.0,
    )
