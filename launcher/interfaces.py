"""What a plugin author implements, and the torch-free values that pass through.

Each plugin class takes no argument, and may carry a nested or imported ``Config`` dataclass that
its YAML options are checked against (none: it has no options).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from launcher.config.schema import LaunchConfig
from launcher.errors import Fault
from launcher.jobs.script import JobHandle, JobRequest, JobScript, JobState
from launcher.plan.model import LayerShape, ModelShape, Plan, StagePlan
from launcher.schedule.actions import Action, PipelineShape
from launcher.topology.cluster import Cluster
from launcher.topology.mesh import Mesh

__all__ = [
    "Action",
    "Architecture",
    "Collective",
    "Executor",
    "Fault",
    "JobShape",
    "LayerShape",
    "ModelShape",
    "Parallel",
    "PipelineShape",
    "RankCost",
    "RoleGroup",
    "Schedule",
    "StagePlan",
]


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


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A kind of message that one rank takes part in during one step."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "send_recv", "all_to_all", "broadcast"]
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


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """What a parallel axis adds on one rank."""

    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Extra bytes by kind, such as ``receive buffers``."""
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RoleGroup:
    """Ranks of one kind of work."""

    name: str
    num_ranks: int
    trains: bool
    """Whether its ranks hold the model and sit on the mesh."""


class Schedule(Protocol):
    """The order of forwards and backwards on each pipeline rank. Pure."""

    def check(self, shape: PipelineShape) -> Iterable[Fault]:
        """Faults of shapes that the schedule cannot run, each with the nearest valid choice."""
        ...

    def actions(self, shape: PipelineShape, pp_rank: int) -> Iterable[Action]:
        """The rank's F and B in order; sends and receives are added by the core."""
        ...

    def bubble_fraction(self, shape: PipelineShape) -> float | None:
        """Idle share of the step in closed form for equal stages, or None where there is none."""
        ...


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


class Architecture(Protocol):
    """Who owns the parameters and how gradients reach them."""

    runtime: str
    """``package.module:update``, called on the ranks with the `RankContext`; returns an `Update`."""
    exact: bool
    """Whether it computes what one device computes."""

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Faults of jobs that this architecture cannot train."""
        ...

    def roles(self, job: JobShape) -> tuple[RoleGroup, ...]:
        """The groups of ranks, trainers first."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Who reserves the machines and who starts the processes on them."""

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Faults of jobs that cannot be started this way."""
        ...

    def render(self, plan: Plan, request: JobRequest) -> JobScript:
        """What will be started. Pure: the same plan and request give the same bytes."""
        ...

    def submit(self, script: JobScript) -> JobHandle:
        """Starts it."""
        ...

    def state(self, handle: JobHandle) -> JobState:
        """How it stands."""
        ...

    def cancel(self, handle: JobHandle) -> None:
        """Ends all of its ranks."""
        ...


Options = Mapping[str, Any]
