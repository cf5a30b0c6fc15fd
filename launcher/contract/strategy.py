"""What a plugin author implements, and the torch-free values that pass through.

Each plugin class takes no argument, and may carry a nested or imported ``Config`` dataclass that
its YAML options are checked against (none: it has no options). Executors are in `launcher.contract.executor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from launcher.base.errors import Fault
from launcher.contract.actions import Action, PipelineShape
from launcher.contract.cluster import Cluster
from launcher.contract.config import LaunchConfig, Recompute
from launcher.contract.mesh import Mesh
from launcher.contract.plan import ExchangePlan, LayerShape, ModelShape, StagePlan

__all__ = [
    "Action",
    "Architecture",
    "Collective",
    "ComparesExchange",
    "Fault",
    "HasNotes",
    "JobShape",
    "KnowsExactness",
    "LayerShape",
    "ModelShape",
    "OwnsExchange",
    "Parallel",
    "PipelineShape",
    "RankCost",
    "RoleGroup",
    "Schedule",
    "StagePlan",
]


DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one number in each format."""


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

    def stages_of(self, pp_rank: int) -> tuple[StagePlan, ...]:
        """The stages of one pipeline rank, in chunk order."""
        return tuple(stage for stage in self.stages if stage.pp_rank == pp_rank)

    def layers(self, stage: StagePlan) -> tuple[LayerShape, ...]:
        """The layers of a stage."""
        return self.model.layers[stage.first_layer : stage.first_layer + stage.num_layers]

    def ends(self, stage: StagePlan) -> tuple[LayerShape, ...]:
        """Prologue and epilogue, where the stage has them."""
        prologue = self.model.prologue if stage.has_prologue else None
        epilogue = self.model.epilogue if stage.has_epilogue else None
        return tuple(part for part in (prologue, epilogue) if part)

    def num_local_parameters(self, pp_rank: int) -> int:
        """Parameters on each rank of a pp_rank, tied ones counted once."""
        stages = self.stages_of(pp_rank)
        parts = [part for stage in stages for part in (*self.layers(stage), *self.ends(stage))]
        whole = sum(part.num_replicated_parameters for part in parts)
        split = sum(part.num_parameters - part.num_replicated_parameters for part in parts)
        if any(stage.has_prologue for stage in stages) and any(stage.has_epilogue for stage in stages):
            split -= self.model.num_tied_parameters
        return whole + -(-split // self.mesh.tp)

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
    count: int
    """Messages per step."""
    overlappable: bool
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
class RankCost:
    """What a parallel axis adds on one rank."""

    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Extra bytes by kind, such as ``receive buffers``."""
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    """Further ones, of buffers that are kept from step to step, such as ``neighbours' weights``."""
    collectives: tuple[Collective, ...] = ()
    keeps_optimizer: bool = True
    """False where the optimizer's state lies on ranks of another role."""
    exposed_s: Callable[[float, float, float], float] | None = None
    """Seconds of a step that its messages of phase ``step`` are waited for, given those of a microbatch's
    forward, of its backward, and of the whole schedule. None: as the planner counts an all-reduce."""


@dataclass(frozen=True, kw_only=True)
class RoleGroup:
    """Ranks of one kind of work."""

    name: str
    num_ranks: int
    trains: bool
    """Whether its ranks hold the model and sit on the mesh."""
    serve: str | None = None
    """``package.module:serve``, called in place of the training loop on the ranks of a role that does not
    train: with the `RankContext`, the run directory, and ``resume`` by name."""
    memory_bytes: int | None = None
    """Bytes that each of its ranks holds, for a role that does not train."""
    is_expendable: bool = False
    """Whether the run goes on when one of its ranks is gone."""
    sized_by: str | None = None
    """Config path of the number of its ranks, for a role that does not train."""


class Schedule(Protocol):
    """The order of forwards and backwards on each pipeline rank. Pure.

    A schedule with options declares them as a frozen dataclass ``Config`` and is made with an instance of it,
    or without anything, which means the defaults.
    """

    splits_backward: bool
    """Whether the schedule runs the two halves of a backward apart: B then computes the gradient of
    the stage's input alone, and a W, any time after it, the weight gradients of that microbatch.
    False, also where a schedule leaves it out: B does both, and there is no W."""

    def check(self, shape: PipelineShape) -> Iterable[Fault]:
        """Faults of shapes that the schedule cannot run, each with the nearest valid choice."""
        ...

    def actions(self, shape: PipelineShape, pp_rank: int) -> Iterable[Action]:
        """The rank's F and B, and W where it splits, in order; sends and receives are added by the core."""
        ...

    def bubble_fraction(self, shape: PipelineShape) -> float | None:
        """Idle share of the step in closed form, or None where there is none.

        For equal stages and free messages, when the gradient of the input and that of the weights
        take as long as a forward each.
        """
        ...


def splits_backward(schedule: Schedule) -> bool:
    """Whether a schedule splits the backward; one that does not say so does not."""
    return bool(getattr(schedule, "splits_backward", False))


class Parallel(Protocol):
    """One way of spreading the work over the ranks of one mesh axis."""

    axis: str
    """``dp``, ``tp`` or ``pp``."""
    runtime: str
    """``package.module:apply``, called on the ranks with the `RankContext`."""

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Faults of jobs that cannot be spread this way."""
        ...

    def cost(self, job: JobShape, pp_rank: int, tp_rank: int) -> RankCost:
        """Memory and traffic that this axis adds on such a rank."""
        ...


@runtime_checkable
class OwnsUpdate(Protocol):
    """A `Parallel` that takes over the update of the parameters, which no other may then do."""

    update: str
    """``package.module:update``, in place of the architecture's."""

    def documents(self, job: JobShape) -> Mapping[str, Mapping[str, Any]]:
        """What the update is configured with: JSON files of the run directory, by name."""
        ...


class Architecture(Protocol):
    """Who owns the parameters and how gradients reach them."""

    runtime: str
    """``package.module:update``, called on the ranks with the `RankContext`; returns an `Update`."""
    exact: bool
    """Whether it computes what one device computes; see `KnowsExactness`."""

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Faults of jobs that this architecture cannot train."""
        ...

    def roles(self, job: JobShape) -> tuple[RoleGroup, ...]:
        """The groups of ranks, trainers first."""
        ...


@runtime_checkable
class OwnsExchange(Protocol):
    """An `Architecture` that says itself what its replicas exchange; that of any other sums all gradients."""

    def exchange(self, job: JobShape, pp_rank: int) -> RankCost:
        """Memory and messages along ``dp`` on such a rank. The loss and its targets are left out, where
        they are summed by an all-reduce."""
        ...


@runtime_checkable
class HasNotes(Protocol):
    """An `Architecture` with something to tell the reader of a plan."""

    def notes(self, job: JobShape) -> Iterable[str]:
        """What that is, each a sentence."""
        ...


@runtime_checkable
class ComparesExchange(Protocol):
    """An `Architecture` that says what its exchange takes beside an all-reduce."""

    def compare(self, job: JobShape) -> ExchangePlan:
        """Both predictions."""
        ...


@runtime_checkable
class KnowsExactness(Protocol):
    """An `Architecture` that computes what one device computes under some of its options only."""

    def is_exact(self, job: JobShape) -> bool:
        """Whether it does in this job; in place of ``exact``."""
        ...


Options = Mapping[str, Any]


def one_chunk_faults(schedule: str, shape: PipelineShape) -> Iterable[Fault]:
    """The fault of more than one model chunk per rank; ``schedule`` is the name that was chosen."""
    if shape.num_chunks > 1:
        yield Fault(
            "parallel.num_chunks",
            shape.num_chunks,
            f"{schedule} runs one model chunk per pipeline rank",
            ways=({"parallel.num_chunks": 1}, {"parallel.schedule": "interleaved_1f1b"}),
        )
