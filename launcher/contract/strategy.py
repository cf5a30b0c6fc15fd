"""What a plugin author implements: a subclass of `Schedule`, `Parallel` or `Architecture`.

Each plugin class takes no argument, and may carry a nested or imported ``Config`` dataclass that
its YAML options are checked against (none: it has no options). A class that has the methods without being a
subclass is given the other methods' defaults. Executors are in `launcher.contract.executor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from launcher.base.errors import Fault
from launcher.base.registry import Plugin
from launcher.contract.actions import Action, PipelineShape
from launcher.contract.config import CHUNKED_SCHEDULE, LaunchConfig
from launcher.contract.model.shape import LayerShape, ModelShape
from launcher.contract.plan import Plan, Section, StagePlan
from launcher.contract.records import Part, RunRecords
from launcher.contract.shape import (
    DTYPE_BYTES,
    FP32_BYTES,
    Collective,
    JobShape,
    LayerKind,
    ModelStates,
    RankCost,
    RoleGroup,
    StepOverlap,
)

__all__ = [
    "DTYPE_BYTES",
    "FP32_BYTES",
    "Action",
    "Architecture",
    "Collective",
    "Fault",
    "JobShape",
    "LayerKind",
    "LayerShape",
    "ModelShape",
    "ModelStates",
    "Parallel",
    "PipelineShape",
    "RankCost",
    "RoleGroup",
    "RunReport",
    "Schedule",
    "Section",
    "StagePlan",
    "StepOverlap",
    "TrainedRun",
]


class Schedule(Plugin):
    """The order of forwards and backwards on each pipeline rank. Pure.

    A schedule with options declares them as a frozen dataclass ``Config`` and is made with an instance of it,
    or without anything, which means the defaults.
    """

    entry_group = "launcher.schedules"
    required = ("actions",)
    splits_backward: bool = False
    """Whether the schedule runs the two halves of a backward apart: B then computes the gradient of
    the stage's input alone, and a W, any time after it, the weight gradients of that microbatch.
    False: B does both, and there is no W."""

    def check(self, shape: PipelineShape) -> Iterable[Fault]:
        """Faults of shapes that the schedule cannot run, each with the nearest valid choice.

        The default refuses more than one model chunk per rank.
        """
        if shape.num_chunks > 1:
            rule = "this schedule runs one model chunk per pipeline rank"
            ways = ({"parallel.num_chunks": 1}, {"parallel.schedule": CHUNKED_SCHEDULE})
            yield Fault("parallel.num_chunks", shape.num_chunks, rule, ways=ways)

    def actions(self, shape: PipelineShape, pp_rank: int) -> Iterable[Action]:
        """The rank's F and B, and W where it splits, in order; sends and receives are added by the core."""
        raise NotImplementedError

    def bubble_fraction(self, shape: PipelineShape) -> float | None:
        """Idle share of the step in closed form, or None where there is none.

        For equal stages and free messages, when the gradient of the input and that of the weights
        take as long as a forward each.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run as a plugin reports on it."""

    name: str
    plan: Plan
    records: RunRecords
    measured: tuple[tuple[Part, ...], ...]
    """The steps after the warm-up, ascending: those of `RunRecords.parts`, each with one record per trainer
    rank."""

    @property
    def measured_steps(self) -> range:
        """The numbers of these steps."""
        return range(self.measured[0][0].first_step, self.measured[-1][0].step + 1)


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What a plugin adds to the report of a run."""

    lines: tuple[str, ...] = ()
    """Beside the times of its step, for a person."""
    notes: tuple[str, ...] = ()
    """What a reader must know, each a sentence."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """For programs, by name."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """For programs, by name."""


class Strategy(Plugin):
    """What parallelism and architectures may say of a job, of its plan and of its run."""

    runtime: str

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Faults of jobs that cannot be trained this way."""
        return ()

    def notes(self, job: JobShape) -> Iterable[str]:
        """What a reader of the plan should know, each a sentence."""
        return ()

    def describe(self, job: JobShape) -> Iterable[Section]:
        """What the plan holds and shows of it beside what every plan has."""
        return ()

    def layout(self, plan: Plan) -> Iterable[str]:
        """What sets a run apart from one without it, in words such as ``reduce=flat``."""
        return ()

    def report(self, run: TrainedRun) -> RunReport:
        """What the report of a run tells of it."""
        return RunReport()


class Parallel(Strategy):
    """One way of spreading the work over the ranks of one mesh axis.

    Those that come with the launcher are asked of every configuration whether they apply; another one is
    when ``parallel.plugins`` names it. One that does not apply is asked for `settings_faults`, `memory_ways`
    and `describe` alone.
    """

    entry_group = "launcher.parallels"
    required = ("axis", "runtime")
    axis: str
    """``dp``, ``tp`` or ``pp``."""
    runtime: str
    """``package.module:apply``, called on the ranks with the `RankContext`."""
    update: str | None = None
    """``package.module:update`` where it takes over the update of the parameters, in place of the
    architecture's; no other may then do."""
    replaces: ClassVar[tuple[str, ...]] = ()
    """Names of plugins that do not apply where it does."""

    def applies(self, config: LaunchConfig) -> bool:
        """Whether it takes part: by default where its axis has more than one rank."""
        return bool(getattr(config.parallel, self.axis) != 1)

    def settings_faults(self, config: LaunchConfig) -> Iterable[Fault]:
        """Faults of settings that need no layout to be seen, such as one without an effect."""
        return ()

    def cost(self, job: JobShape, pp_rank: int) -> RankCost:
        """Memory and traffic that it adds on such a rank."""
        return RankCost()

    def memory_ways(self, job: JobShape) -> Iterable[Mapping[str, Any]]:
        """Settings of it under which a rank would hold less of the model states."""
        return ()

    def documents(self, job: JobShape) -> Mapping[str, Mapping[str, Any]]:
        """What an update of its own is configured with: JSON files of the run directory, by name."""
        return {}


class Architecture(Strategy):
    """Who owns the parameters and how gradients reach them."""

    entry_group = "launcher.architectures"
    required = ("runtime", "exact")
    runtime: str
    """``package.module:update``, called on the ranks with the `RankContext`; returns an `Update`."""
    exact: bool
    """Whether it computes what one device computes."""
    takes_back: bool = False
    """Whether all ranks can leave out the update of a step, or go back to a checkpoint, in the same step."""

    def roles(self, job: JobShape) -> tuple[RoleGroup, ...]:
        """The groups of ranks, trainers first."""
        return (RoleGroup(name="trainer", num_ranks=job.mesh.num_ranks, trains=True),)

    def is_exact(self, job: JobShape) -> bool:
        """Whether it computes what one device computes in this job."""
        return self.exact

    def cost(self, job: JobShape, pp_rank: int) -> RankCost | None:
        """Memory and messages along ``dp`` on such a rank, without those of the loss and its targets where an
        all-reduce sums them. None: all gradients are summed."""
        return None

    def layout(self, plan: Plan) -> Iterable[str]:
        """Its name, and how many ranks do not train."""
        yield plan.config.architecture.name
        yield from (f"{role.name}s={role.num_ranks}" for role in plan.roles if not role.trains)
