"""The job that plugins judge, and what they say that it costs. Values alone, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

from launcher.contract.actions import PipelineShape
from launcher.contract.config import LaunchConfig, Recompute
from launcher.contract.mesh import Cluster, Mesh
from launcher.contract.model.shape import LayerShape, ModelShape, ParameterShape
from launcher.contract.optim.plugin import Optimizer, optimizer_of
from launcher.contract.plan import Role, StagePlan

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one number in each format."""
FP32_BYTES = DTYPE_BYTES["fp32"]

LayerKind = tuple[LayerShape, Recompute]
"""A layer, embedding or head without its name, and what is computed again of it: equal ones take equally
long."""


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """Everything the cost and the soundness of a strategy depend on."""

    config: LaunchConfig
    cluster: Cluster
    mesh: Mesh
    model: ModelShape
    pipeline: PipelineShape
    stages: tuple[StagePlan, ...]
    """In stage order; empty while the layers cannot be split."""
    micro_size: int
    """Samples per microbatch."""
    global_size: int
    """Samples per step."""
    roles: tuple[RoleGroup, ...] = ()
    """The groups of ranks, trainers first; empty until the architecture has judged the job."""
    time_factors: Mapping[LayerKind, tuple[float, float]] = field(default_factory=dict)
    """By kind of layer, what its predicted forward and backward are multiplied by, where a run measured them
    (`device.measured_in`); empty: nothing."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return DTYPE_BYTES[self.config.precision.compute]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one accumulated gradient."""
        return DTYPE_BYTES[self.config.precision.gradients]

    def unsharded_states(self, pp_rank: int) -> ModelStates:
        """Model states of such a rank where nothing splits them: weights, and of those that are trained the
        gradients and the optimizer's states in the format that is updated, an fp32 copy where there is
        one."""
        precision, number = self.config.precision, self.num_trained_parameters(pp_rank)
        has_copy = precision.compute != "fp32" and precision.master_weights
        num_saved = self.num_local_parameters(pp_rank) - (number if has_copy else 0)
        optimizer = self.num_state_elements(pp_rank) * (FP32_BYTES if has_copy else self.compute_bytes)
        optimizer += number * FP32_BYTES if has_copy else 0
        return ModelStates(
            weights_bytes=self.num_local_parameters(pp_rank) * self.compute_bytes,
            gradients_bytes=number * self.gradient_bytes,
            optimizer_bytes=optimizer,
            saved_bytes=optimizer + num_saved * self.compute_bytes,
        )

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer that updates the parameters."""
        return optimizer_of(self.config)

    @property
    def states_per_parameter(self) -> int:
        """Elements that an elementwise optimizer keeps of every element."""
        return len(self.optimizer.states(ParameterShape(name="", shape=(1,)), self.config))

    def num_state_elements(self, pp_rank: int | None = None) -> int:
        """Elements that the optimizer keeps of the parameters of such a rank, or of the whole model.

        One that needs whole tensors finds none of them split.
        """
        if self.optimizer.is_elementwise:
            number = (
                self.model.num_trained_parameters if pp_rank is None else self.num_trained_parameters(pp_rank)
            )
            return number * self.states_per_parameter
        stages = self.stages if pp_rank is None else self.stages_of(pp_rank)
        layers = (index for stage in stages for index in stage.layers)
        ends = (end for stage in stages for end in self.ends(stage))
        trained = (each for each in self.model.parameters_of(layers, *ends) if each.is_trained)
        return sum(
            prod(shape) for each in trained for shape in self.optimizer.states(each, self.config).values()
        )

    def stages_of(self, pp_rank: int) -> tuple[StagePlan, ...]:
        """The stages of one pipeline rank, in chunk order."""
        return self._stages_by_rank.get(pp_rank, ())

    @cached_property
    def _stages_by_rank(self) -> dict[int, tuple[StagePlan, ...]]:
        """Found once: a plan asks for those of every rank many times."""
        found: dict[int, tuple[StagePlan, ...]] = {}
        for stage in self.stages:
            found[stage.pp_rank] = (*found.get(stage.pp_rank, ()), stage)
        return found

    def layers(self, stage: StagePlan) -> tuple[LayerShape, ...]:
        """The layers of a stage."""
        return self.model.layers[stage.first_layer : stage.first_layer + stage.num_layers]

    def ends(self, stage: StagePlan) -> tuple[LayerShape, ...]:
        """Prologue and epilogue, where the stage has them."""
        prologue = self.model.prologue if stage.has_prologue else None
        epilogue = self.model.epilogue if stage.has_epilogue else None
        return tuple(part for part in (prologue, epilogue) if part)

    def parts(self, stage: StagePlan) -> list[tuple[LayerShape, Recompute]]:
        """The layers and ends of a stage, each with what is computed again of it."""
        layers = [(layer, stage.recompute) for layer in self.layers(stage)]
        return [*layers, *((end, "none") for end in self.ends(stage))]

    def num_local_parameters(self, pp_rank: int) -> int:
        """Parameters on each rank of a pp_rank, tied ones counted once."""
        stages = self.stages_of(pp_rank)
        parts = [part for stage in stages for part, _ in self.parts(stage)]
        whole = sum(part.num_replicated_parameters for part in parts)
        split = sum(part.num_parameters - part.num_replicated_parameters for part in parts)
        if any(stage.has_prologue for stage in stages) and any(stage.has_epilogue for stage in stages):
            split -= self.model.num_tied_parameters
        return whole + -(-split // self.mesh.tp)

    def num_trained_parameters(self, pp_rank: int) -> int:
        """Of them, those that are trained: with a gradient, moments, and what else an update needs."""
        stages = self.stages_of(pp_rank)
        parts = [part for stage in stages for part, _ in self.parts(stage)]
        frozen = sum(part.num_local_frozen_parameters(self.mesh.tp) for part in parts)
        if any(stage.has_prologue for stage in stages) and any(stage.has_epilogue for stage in stages):
            frozen -= -(-self.model.num_frozen_tied_parameters // self.mesh.tp)
        return self.num_local_parameters(pp_rank) - frozen

    def local_activation_bytes(self, elements: int) -> int:
        """Bytes of one microbatch's activation that lies between the regions split by tp."""
        split = self.mesh.tp if self.config.parallel.sequence_parallel else 1
        return self.micro_size * -(-elements // split) * self.compute_bytes


Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "send_recv", "all_to_all", "broadcast", "push", "pull"
]
"""How a message goes; ``push`` and ``pull``: to and from all ranks of a role that does not train."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A kind of message that one rank takes part in during one step."""

    operation: Operation
    purpose: str
    """What it carries, such as ``gradients``."""
    axis: str
    """Mesh axis it runs along."""
    num_bytes: int
    """Size of the buffer of one message, before the algorithm's factor."""
    count: int = 1
    """Messages per step."""
    overlappable: bool = False
    """Whether it can be hidden behind compute."""
    phase: Literal["begin", "forward", "backward", "step"] = "step"
    """Which part of the work waits for it when it cannot be hidden. ``begin``: it is started once, with the
    step, which can hide it behind the whole schedule; ``step``: once, at the end."""
    group_size: int | None = None
    """Members of the group where it is not the whole axis (two holders of tied weights)."""
    link: Literal["intra_node", "inter_node"] | None = None
    """The cluster's link that it takes; None: the slowest between any two ranks of the axis."""
    contention: float = 1.0
    """How many times longer each byte takes where several ranks share the link of the one they talk to."""


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of weights, gradients and optimizer state on one rank's device."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    """What the rank writes into a checkpoint at most."""
    is_sharded: bool = False
    """Whether the replicas share the update out among them: each then saves its own part, and what the update
    holds for a moment (converted gradients, scratch of the optimizer) is counted by who splits it."""

    @property
    def total_bytes(self) -> int:
        """What the device holds."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class StepOverlap:
    """An exchange of a step that goes bucket by bucket: out behind the last backward, in before the first
    forward of the next step."""

    num_buckets: int
    backward_s: float = 0.0
    """Seconds of what goes beside the last backward."""
    forward_s: float = 0.0
    """Seconds of what goes beside the first forward."""
    waited_s: float = 0.0
    """Seconds that nothing hides."""
    busiest_s: float = 0.0
    """Seconds that the busiest member needs for all of a step: no step is shorter."""

    def exposed_s(self, forward_s: float, backward_s: float, schedule_s: float) -> float:
        """Seconds of a step that its forwards and backwards do not hide.

        ``forward_s``, ``backward_s``: of the first and of the last microbatch; ``schedule_s``: of all.
        """
        exposed_s = self._left(self.backward_s, backward_s) + self._left(self.forward_s, forward_s)
        return max(exposed_s + self.waited_s, self.busiest_s - schedule_s)

    def _left(self, transfer_s: float, compute_s: float) -> float:
        """What of a transfer a computation does not hide that goes through the same buckets, one behind the
        other: the slower of the two goes on all the time, and the other adds its part of one bucket."""
        count = self.num_buckets
        return max(transfer_s / count, transfer_s - compute_s * (1 - 1 / count))


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """What a parallel axis adds on one rank."""

    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Extra bytes by kind, such as ``receive buffers``."""
    persistent_bytes: Mapping[str, int] = field(default_factory=dict)
    """Further ones, of buffers that are kept from step to step, such as ``neighbours' weights``."""
    collectives: tuple[Collective, ...] = ()
    states: ModelStates | None = None
    """What the rank holds of the model states; None: all of them."""
    overlap: StepOverlap | None = None
    """How its messages of phase ``step`` hide behind the compute. None: as those of an all-reduce."""


@dataclass(frozen=True, kw_only=True)
class RoleGroup(Role):
    """A role as an architecture asks for it."""

    sized_by: str | None = None
    """Config path of the number of its ranks, for a role that does not train."""
