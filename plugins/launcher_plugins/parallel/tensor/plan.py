"""Tensor parallelism: every matrix is split over the ranks of a group.

In each half of a layer the first matrix is split by columns and the second by rows, so that only
the end of the half needs a sum. With X whole on every rank:

    attention   X -> [q k v, split by heads] -> attention -> [output, split by rows] -> all-reduce
    MLP         X -> [up, split by columns]  -> GELU      -> [down, split by rows]   -> all-reduce

The backward sums the gradient of X at the beginning of each half. With sequence parallelism X is
split along the sequence: an all-gather where a half begins and a reduce-scatter where it ends
replace each all-reduce, and move the same bytes.

Source: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al. (2022), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import gcd
from typing import Literal

from launcher.base.arithmetic import divisors, nearest_first
from launcher.contract.optim.plugin import whole_tensor_faults
from launcher.contract.shape import Operation
from launcher.contract.strategy import FP32_BYTES, Collective, Fault, JobShape, Parallel, RankCost, StagePlan

_MAX_DEGREES = 4
"""Degrees that are proposed in place of one that does not fit, the nearest first."""
_message = partial(Collective, axis="tp")


class TensorParallel(Parallel):
    """Megatron's split of a GPT or Llama model."""

    axis = "tp"
    runtime = "launcher_plugins.parallel.tensor.runtime.layers:apply"

    def check(self, job: JobShape) -> Iterable[Fault]:
        """The split sizes must be multiples of tp; a user's own layers cannot be split."""
        why = f"parallel.tp={job.mesh.tp} leaves a part of each matrix on a rank"
        yield from whole_tensor_faults(job.config, why, {"parallel.tp": 1})
        model, tp = job.config.model, job.mesh.tp
        if model.family == "custom":
            rule = "the layers that model.target builds are whole: they spread along dp and pp alone"
            yield Fault("parallel.tp", tp, rule, ways=({"parallel.tp": 1},))
            return
        sizes = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "ffn_size": model.ffn_size}
        known = {name: size for name, size in sizes.items() if size is not None}
        if uneven := {name: size for name, size in known.items() if size % tp}:
            named = ", ".join(f"model.{name} = {size}" for name, size in uneven.items())
            quotients = ", ".join(f"{size}/{tp}" for size in uneven.values())
            rule = f"must divide {named}; {quotients} {'is' if len(uneven) == 1 else 'are'} not whole"
            nearest = nearest_first(tp, divisors(gcd(*known.values())))
            ways = tuple({"parallel.tp": degree} for degree in nearest[:_MAX_DEGREES])
            yield Fault("parallel.tp", tp, rule, ways=ways)

    def cost(self, job: JobShape, pp_rank: int) -> RankCost:
        """The sums inside every layer, in the embedding and in the loss."""
        collectives: list[Collective] = []
        for stage in job.stages_of(pp_rank):
            collectives += _layer_sums(job, stage)
            if stage.has_prologue:
                collectives += _edge(job, stage, "embedding", leaves=1, enters=0)
            if stage.has_epilogue:
                collectives += [*_edge(job, stage, "head", leaves=0, enters=1), *_loss(job)]
        collectives += _replicated_gradients(job, pp_rank)
        if job.mesh.pp == 1:
            collectives.append(
                _message(operation="all_reduce", purpose="gradient norm", num_bytes=FP32_BYTES)
            )
        return RankCost(collectives=tuple(collectives))


def gathers_again(job: JobShape, stage: StagePlan) -> bool:
    """Whether split regions keep their input in parts of the sequence and gather it in the backward."""
    return job.config.parallel.sequence_parallel and stage.recompute != "full"


def _layer_sums(job: JobShape, stage: StagePlan) -> list[Collective]:
    """Two split regions per layer. Recomputation runs both again, up to the last result that the
    backward needs: the sum at the end of the layer only where a dropout mask follows it."""
    sums = _edge(job, stage, "layers", leaves=2 * stage.num_layers, enters=2 * stage.num_layers)
    if stage.recompute == "full":
        leaves = 2 if job.config.model.dropout > 0 else 1
        sums += _forward(job, "recomputation", leaves * stage.num_layers, 2 * stage.num_layers, "backward")
    return sums


def _edge(job: JobShape, stage: StagePlan, purpose: str, *, leaves: int, enters: int) -> list[Collective]:
    """Forward and backward of some ends (``leaves``) and beginnings (``enters``) of split regions.
    In the backward an end is a beginning and the other way round."""
    forward = _forward(job, purpose, leaves, enters, "forward")
    gathered_again = enters if gathers_again(job, stage) else 0
    return forward + _forward(job, purpose, enters, leaves + gathered_again, "backward")


def _forward(
    job: JobShape, purpose: str, leaves: int, enters: int, phase: Literal["forward", "backward"]
) -> list[Collective]:
    elements = job.model.layers[0].output_elements
    size, m = job.micro_size * elements * job.compute_bytes, job.pipeline.num_microbatches
    counts: dict[Operation, int] = {"all_reduce": leaves}
    if job.config.parallel.sequence_parallel:
        counts = {"all_gather": enters, "reduce_scatter": leaves}
    return [
        _message(operation=operation, purpose=purpose, num_bytes=size, count=count * m, phase=phase)
        for operation, count in counts.items()
        if count
    ]


def _loss(job: JobShape) -> list[Collective]:
    """Per token the largest logit; then the sum of exponentials with the target's logit."""
    tokens, m = job.micro_size * job.config.batch.seq_length, job.pipeline.num_microbatches
    sizes = {"largest logit": tokens * FP32_BYTES, "sums of the loss": 2 * tokens * FP32_BYTES}
    return [
        _message(operation="all_reduce", purpose=purpose, num_bytes=size, count=m, phase="forward")
        for purpose, size in sizes.items()
    ]


def _replicated_gradients(job: JobShape, pp_rank: int) -> list[Collective]:
    """Gradients of whole parameters, in one message. Each rank has seen its heads of those inside a region
    (norms of queries and keys), and its part of the sequence of the others, where that is split: norms,
    biases added after a sum, the table of positions."""
    parts = [part for stage in job.stages_of(pp_rank) for part, _ in job.parts(stage)]
    is_split = job.config.parallel.sequence_parallel
    numbers = (part.num_replicated_parameters if is_split else part.num_region_parameters for part in parts)
    size = sum(numbers) * job.gradient_bytes
    message = _message(operation="all_reduce", purpose="replicated gradients", num_bytes=size)
    return [message] if size else []
