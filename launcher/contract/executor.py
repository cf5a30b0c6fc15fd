"""What the author of an executor implements: who reserves machines, and starts processes on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from launcher.base.errors import Fault
from launcher.contract.job import GroupRequest, JobHandle, JobRequest, JobScript, JobState
from launcher.contract.plan import Plan
from launcher.contract.strategy import JobShape


@runtime_checkable
class Executor(Protocol):
    """Who reserves the machines and who starts the processes on them."""

    is_local: bool
    """Whether `submit` starts the ranks on this machine, at once."""

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Faults of jobs that cannot be started this way."""
        ...

    def notes(self, job: JobShape) -> Iterable[str]:
        """What a reader should know about the life of the job, each a sentence."""
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


@runtime_checkable
class TellsRanks(Protocol):
    """An `Executor` that can tell the ranks of a running job to save and end."""

    def tell_to_end(self, handle: JobHandle) -> None:
        """Tells every rank, and returns at once. Those that do not save end like any process."""
        ...


@runtime_checkable
class KnowsQueue(Protocol):
    """An `Executor` that can say of many jobs at once how they stand."""

    def states(self, handles: Sequence[JobHandle]) -> list[JobState]:
        """How each of them stands; as `Executor.state`."""
        ...


@runtime_checkable
class GroupsJobs(Protocol):
    """An `Executor` that can submit many jobs as one, whose tasks they are."""

    def group(self, scripts: Sequence[JobScript], request: GroupRequest) -> JobScript | None:
        """What submits the jobs together; None where they do not all ask for the same. Pure."""
        ...

    def members(self, handle: JobHandle, tasks: Sequence[int]) -> list[str]:
        """The id of every task of such a job, by which `Executor.state` knows it."""
        ...


@runtime_checkable
class KnowsAllocation(Protocol):
    """An `Executor` that can say how long a job of its own still lasts."""

    def time_left_s(self, job: str) -> float | None:
        """Seconds until the time limit of a job; None where there is no limit, or no such job."""
        ...


@runtime_checkable
class LimitsTime(Protocol):
    """An `Executor` whose jobs are ended when their time is up."""

    def time_notes(self, job: JobShape, predicted_s: float) -> Iterable[str]:
        """What a reader should know about a run that is predicted to take so long, each a sentence."""
        ...


@dataclass(frozen=True, kw_only=True)
class SiteQuestion:
    """A setting of a new site that the cluster leaves to a person."""

    setting: str
    """Name of a field of `SiteConfig`."""
    proposal: str | None
    """What is taken when the person says nothing; None: the setting is left out."""
    choices: tuple[str, ...] = ()
    """Every answer that is one; empty: any."""
    is_required: bool = False
    """Whether the setting cannot be left out."""


class SiteSurvey(Protocol):
    """What a cluster says about itself."""

    @property
    def facts(self) -> tuple[str, ...]:
        """What a reader should know, each a line."""
        ...

    def question(self, answers: Mapping[str, str | None]) -> SiteQuestion | None:
        """The next setting to ask for, given the answers so far; None when nothing is left open."""
        ...


@runtime_checkable
class KnowsSite(Protocol):
    """An `Executor` that can ask its cluster."""

    def survey(self) -> SiteSurvey:
        """Asks the cluster what it is like."""
        ...

    def try_out(self, script: JobScript) -> None:
        """Has the scheduler check a job that it is not given; a `JobError` is its refusal."""
        ...
