"""Bytes that a rank of each pp_rank holds at its fullest moment.

    weights      its parameters in the compute format
    gradients    one per trained parameter in the gradient format
    optimizer    its states and, where weights are not fp32, their fp32 master copy
    activations  what every microbatch in flight keeps, followed through the rank's own action list
    other        receives posted ahead, sends under way, the mask of a window, the logits, the layer under
                 recomputation, gradients converted for the update, scratch of an optimizer that is not fused,
                 what the parallel plugins add, and on the CPU the copy of the state from which a
                 checkpoint is written while the training goes on

So fp32 training takes 4 + 4 + 8 = 16 bytes a parameter, bf16 with fp32 gradients 2 + 4 + 12 = 18, unless a
plugin splits these states or keeps them elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from launcher.contract.actions import RB, RF, SENDS_IN_FLIGHT, Action, B, F, W, has_weight_actions
from launcher.contract.config import LaunchConfig
from launcher.contract.model.shape import LayerShape
from launcher.contract.plan import MemoryPlan, StagePlan
from launcher.contract.strategy import DTYPE_BYTES, FP32_BYTES, JobShape, ModelStates, RankCost
from launcher.schedule.simulate import peak_held


def plan_memory(
    job: JobShape, lists: Sequence[Sequence[Action]], costs: Sequence[Sequence[RankCost]]
) -> tuple[MemoryPlan, ...]:
    """The memory of the ranks of every pp_rank, in order.

    ``costs``: per pp_rank, what each parallel plugin adds.
    """
    change = _held_changes(job, is_split=has_weight_actions(lists))
    received = _receive_changes(job)
    held = peak_held(lists, job.pipeline)
    plans = []
    for pp_rank, actions in enumerate(lists):
        states = states_of(job, pp_rank, costs[pp_rank])
        plans.append(
            MemoryPlan(
                pp_rank=pp_rank,
                weights_bytes=states.weights_bytes,
                gradients_bytes=states.gradients_bytes,
                optimizer_bytes=states.optimizer_bytes,
                activations_bytes=_peak_bytes(actions, change),
                peak_microbatches=held[pp_rank],
                other_bytes=_other_bytes(job, pp_rank, _peak_bytes(actions, received), costs[pp_rank]),
                persistent_bytes=_summed(cost.persistent_bytes for cost in costs[pp_rank]),
            )
        )
    return tuple(plans)


def states_of(job: JobShape, pp_rank: int, costs: Sequence[RankCost]) -> ModelStates:
    """The model states on such a rank, as the plugin says that splits or moves them, else all of them."""
    told = (cost.states for cost in costs if cost.states is not None)
    return next(told, None) or job.unsharded_states(pp_rank)


def copies_checkpoints(config: LaunchConfig) -> bool:
    """Whether a copy of the state is kept in the memory of the host, from which checkpoints are written."""
    return config.train.async_checkpoint and config.train.checkpoint_interval > 0


def _held_changes(job: JobShape, *, is_split: bool) -> Mapping[str, Sequence[int]]:
    """What a microbatch holds from its forward to its backward; where that is split, until its W.

    What the B of a split backward recomputes stays until the W that needs it, too.
    """
    kept = [saved_activation_bytes(job, stage) for stage in job.stages]
    if not is_split:
        return {F: kept, B: [-size for size in kept]}
    whole = [_whole_bytes(job, stage) for stage in job.stages]
    recomputed = [everything - size for everything, size in zip(whole, kept, strict=True)]
    return {F: kept, B: recomputed, W: [-size for size in whole]}


def saved_activation_bytes(job: JobShape, stage: StagePlan) -> int:
    """Bytes that one microbatch leaves on a stage between its forward and its backward.

    Full recomputation keeps only the input of every layer, selective what its layers say. The message that
    a stage receives stays too, since its backward ends there; what it sends is let go.
    """
    if stage.recompute == "none":
        return _whole_bytes(job, stage)
    if stage.recompute == "selective":  # the first norm keeps the very tensor that the stage receives
        kept = sum(part_bytes(job, layer) - again_bytes(job, layer) for layer in job.layers(stage))
    else:
        with_backward = stage.layers[stage.num_frozen :]
        kept = sum(job.local_activation_bytes(_input_elements(job, layer)) for layer in with_backward)
    return kept + _ends_bytes(job, stage)


def again_bytes(job: JobShape, layer: LayerShape) -> int:
    """Bytes of what selective recomputation of a layer computes again."""
    return part_bytes(job, layer) - part_bytes(job, layer.selective or layer)


def _whole_bytes(job: JobShape, stage: StagePlan) -> int:
    """As `saved_activation_bytes`, nothing recomputed."""
    is_held = stage.recompute != "full"
    layers = sum(part_bytes(job, layer, is_held=is_held) for layer in job.layers(stage))
    # In fp32 the first norm keeps the very tensor that the stage receives.
    has_own = job.config.precision.compute != "fp32" and not stage.is_frozen
    received = _message_bytes(job, stage) if has_own else 0
    return layers + received + _ends_bytes(job, stage)


def _ends_bytes(job: JobShape, stage: StagePlan) -> int:
    """What embedding and head keep."""
    return sum(part_bytes(job, end, is_held=stage.recompute != "full") for end in job.ends(stage))


def part_bytes(job: JobShape, part: LayerShape, *, is_held: bool = True) -> int:
    """Bytes that one microbatch leaves in a layer, nothing recomputed.

    ``is_held``: from the forward to the backward; otherwise only while the layer is being recomputed.
    """
    split = part.kept_elements * job.compute_bytes + part.kept_fp32_elements * FP32_BYTES
    between = (
        part.kept_replicated_elements * job.compute_bytes
        + part.kept_replicated_fp32_elements * FP32_BYTES
        + part.kept_replicated_bytes
    )
    whole = part.kept_gathered_elements * job.compute_bytes
    if is_held:  # kept in parts, and gathered again in the backward
        between, whole = between + whole, 0
    num_sequence_parts = job.mesh.tp if job.config.parallel.sequence_parallel else 1
    return job.micro_size * (-(-split // job.mesh.tp) - (-between // num_sequence_parts) + whole)


def _message_bytes(job: JobShape, stage: StagePlan) -> int:
    """Size of the message that a stage receives for one microbatch; 0 for the first stage."""
    return job.local_activation_bytes(_input_elements(job, stage.first_layer)) if stage.stage else 0


def _input_elements(job: JobShape, layer: int) -> int:
    """Elements of a layer's input; 0 for a first layer that is fed with the samples themselves."""
    before = job.model.layers[layer - 1] if layer else job.model.prologue
    return before.output_elements if before else 0


def _peak_bytes(actions: Sequence[Action], change: Mapping[str, Sequence[int]]) -> int:
    """The most that is held at once when an action adds ``change[kind][stage]`` bytes, if it has any."""
    return max(accumulate(change[kind][stage] for stage, kind, _ in actions if kind in change), default=0)


def _other_bytes(
    job: JobShape, pp_rank: int, received_bytes: int, costs: Sequence[RankCost]
) -> Mapping[str, int]:
    stages, states = job.stages_of(pp_rank), states_of(job, pp_rank, costs)
    other = {
        "receive buffers": received_bytes,
        "sends under way": _send_bytes(job, stages),
        "attention mask": job.model.num_mask_elements * job.compute_bytes,
        "logits": max(_logits_bytes(job, stage) for stage in stages),
        "converted gradients": 0 if states.is_sharded else _converted_bytes(job, pp_rank),
        "optimizer scratch": 0 if states.is_sharded else _scratch_bytes(job, pp_rank),
    }
    if copies_checkpoints(job.config) and job.config.device.kind == "cpu":
        other["checkpoint copy"] = states.saved_bytes
    other["recomputed layer"] = max(
        _recomputed_bytes(job, stage, layer) for stage in stages for layer in job.layers(stage)
    )
    return _summed([other, *(cost.memory_bytes for cost in costs)])


def _summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by name over all parts, without those that are none."""
    return dict(sum(map(Counter, parts), Counter()))


def _recomputed_bytes(job: JobShape, stage: StagePlan, layer: LayerShape) -> int:
    """What is there again at once while the backward goes through a layer."""
    if stage.recompute == "full":
        return part_bytes(job, layer, is_held=False)
    return again_bytes(job, layer) if stage.recompute == "selective" else 0


def _logits_bytes(job: JobShape, stage: StagePlan) -> int:
    """The logits beside the probabilities made of them: in fp32, and before that in the compute format."""
    if not (stage.has_epilogue and job.model.epilogue):
        return 0
    each = FP32_BYTES if job.config.precision.compute == "fp32" else FP32_BYTES + job.compute_bytes
    return job.micro_size * -(-job.model.epilogue.kept_fp32_elements * each // job.mesh.tp)


def _converted_bytes(job: JobShape, pp_rank: int) -> int:
    """A second copy of the gradients, for an update in another format than they are kept in."""
    precision = job.config.precision
    updated = "fp32" if precision.master_weights else precision.compute
    return 0 if updated == precision.gradients else job.num_trained_parameters(pp_rank) * DTYPE_BYTES[updated]


def _scratch_bytes(job: JobShape, pp_rank: int) -> int:
    """What the optimizer makes beside its state while it runs, of all weights at once or of one tensor, of
    which a whole layer is the upper bound."""
    precision, number = job.config.precision, job.num_trained_parameters(pp_rank)
    parts = [part for stage in job.stages_of(pp_rank) for part, _ in job.parts(stage)]
    largest = min(number, max(part.num_trained_parameters for part in parts))
    number = job.optimizer.scratch_elements(job.optimizer.kernel(job.config), number, largest)
    return number * DTYPE_BYTES["fp32" if precision.master_weights else precision.compute]


def _send_bytes(job: JobShape, stages: Sequence[StagePlan]) -> int:
    """The sends that a rank has under way, at the largest of its messages."""
    neighbours = [each for stage in stages for each in job.stages[stage.stage : stage.stage + 2]]
    largest = max(_message_bytes(job, stage) for stage in neighbours)
    num_sends = 2 * job.pipeline.num_microbatches * len(stages)
    return min(SENDS_IN_FLIGHT, num_sends) * largest if job.mesh.pp > 1 else 0


def _receive_changes(job: JobShape) -> Mapping[str, Sequence[int]]:
    """A receive holds its buffer from its posting until the forward has taken the input over, or the
    backward has used up the gradient."""
    inputs = [_message_bytes(job, stage) for stage in job.stages]
    below = job.stages[:-1]  # each sends what it computed, and is sent the gradient of that, if it has one
    gradients = [0 if stage.is_frozen else inputs[stage.stage + 1] for stage in below] + [0]
    taken, used = [-size for size in inputs], [-size for size in gradients]
    return {RF: inputs, F: taken, RB: gradients, B: used} if job.mesh.pp > 1 else {}
