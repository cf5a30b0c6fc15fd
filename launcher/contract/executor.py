"""What the author of an executor implements: who reserves machines, and starts processes on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.base.errors import Fault
from launcher.base.registry import Plugin
from launcher.contract.job import GroupRequest, JobHandle, JobRequest, JobScript, JobState
from launcher.contract.plan import Plan


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


class Executor(Plugin):
    """Who reserves the machines and who starts the processes on them."""

    entry_group = "launcher.executors"
    required = ("is_local", "render", "submit", "state", "cancel")
    is_local: bool
    """Whether `submit` starts the ranks on this machine, at once."""
    job_variable: str | None = None
    """Environment variable with the id of the job that a process is inside of. Read of executors that come
    with the launcher alone, as no plugin is loaded that is not named."""

    def check(self, plan: Plan, run_dir: str | None = None) -> Iterable[Fault]:
        """Faults of plans that cannot be started this way: planning notes them, and a start is refused.

        ``run_dir``: absolute path of the run directory; None while that is not known.
        """
        return ()

    def notes(self, plan: Plan) -> Iterable[str]:
        """What a reader should know about the life of the job, each a sentence."""
        return ()

    def render(self, plan: Plan, request: JobRequest) -> JobScript:
        """What will be started. Pure: the same plan and request give the same bytes. The plan is one that
        `check` has found nothing wrong with."""
        raise NotImplementedError

    def submit(self, script: JobScript) -> JobHandle:
        """Starts it.

        Raises:
            JobError: when it is refused; so do `state` and `cancel` where they get no answer.
        """
        raise NotImplementedError

    def state(self, handle: JobHandle) -> JobState:
        """How it stands."""
        raise NotImplementedError

    def states(self, handles: Sequence[JobHandle]) -> list[JobState]:
        """How many jobs stand, asked of all at once where that can be done."""
        return [self.state(handle) for handle in handles]

    def cancel(self, handle: JobHandle) -> None:
        """Ends all of its ranks."""
        raise NotImplementedError

    def request_stop(self, handle: JobHandle) -> bool:
        """Tells the ranks of a running job to save and end, and returns at once: whether they can be told.
        Those that do not save end like any process."""
        return False

    def after_start(self, plan: Plan, num_starts: int) -> str:
        """What starts the ranks again when their start of this number ends before the run does, as a clause;
        empty: nothing does."""
        return ""

    def group(self, scripts: Sequence[JobScript], request: GroupRequest) -> JobScript | None:
        """What submits many jobs as one, whose tasks they are; None where that cannot be done, as where they
        ask for different things. Pure."""
        return None

    def members(self, handle: JobHandle, tasks: Sequence[int]) -> list[str]:
        """The id of every task of such a job, by which `state` knows it."""
        raise NotImplementedError

    def time_left_s(self, job: str) -> float | None:
        """Seconds until the time limit of a job of its own; None where there is no limit, or no such job."""
        return None

    def survey(self) -> SiteSurvey | None:
        """Asks the cluster what it is like; None where there is nobody to ask."""
        return None

    def try_out(self, script: JobScript) -> None:
        """Has the scheduler check a job that it is not given; a `JobError` is its refusal."""
