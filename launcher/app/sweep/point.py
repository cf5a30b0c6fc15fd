"""A run of a sweep, as far as it has come."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from launcher.base.errors import Fault
from launcher.base.files import safe_name
from launcher.contract.job import JobState
from launcher.contract.plan import Plan
from launcher.runs.failure import out_of_memory_ranks
from launcher.runs.store import RunDirectory

if TYPE_CHECKING:
    from launcher.report.runs import Run  # reads records, which only a table of results needs

_NAME_LENGTH = 80
_PENDING = JobState(phase="pending")
PointState = Literal[
    "not started", "pending", "running", "succeeded", "out of memory as planned", "failed", "cancelled"
]
DONE: tuple[PointState, ...] = ("succeeded", "out of memory as planned")
"""The states of points that came to what they were for."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep. What is not known of it yet is None or empty."""

    overrides: tuple[str, ...]
    """All that the recipe is composed with."""
    label: str
    """The values of its axes by short names, such as ``dp=1 pp=2``."""
    planned: Plan | None = None
    faults: tuple[Fault, ...] = ()
    """Why it cannot run."""
    stored: RunDirectory | None = None
    index: int = 0
    """Among the points of its sweep that can run."""
    has_started: bool = False
    state: JobState = _PENDING
    """Of the job, once it has started."""
    measured: Run | None = None
    """What it measured, once it has succeeded."""
    speedup: float | None = None
    problem: str = ""
    """Why there is no measure, or no speedup, of a run that succeeded."""

    @property
    def plan(self) -> Plan:
        """What its ranks do."""
        assert self.planned is not None, f"the point {self.label} is not planned"
        return self.planned

    @property
    def directory(self) -> RunDirectory:
        """The directory of its run."""
        assert self.stored is not None, f"the point {self.label} has no directory"
        return self.stored

    @property
    def is_waiting(self) -> bool:
        """Whether it is recorded and nobody has started it yet."""
        return self.directory.status().phase == "prepared"

    @property
    def state_text(self) -> PointState:
        """Its state in a word or two. One that is to show what its plan promises (`report.claims`) has not
        failed where it ended out of memory, as that plan had warned."""
        if not self.has_started:
            return "not started"
        if self.state.phase == "failed" and self.plan.config.report.claims and not self.plan.fits:
            return "out of memory as planned" if out_of_memory_ranks(self.directory.path) else "failed"
        return self.state.phase

    def folder(self, count: int) -> str:
        """A harmless name for its directory, which no other of ``count`` points has.

        >>> Point(overrides=(), label="pp=2 path=/a;b", index=7).folder(12)
        '07-pp_2-path_a_b'
        """
        parts = [safe_name(part) for part in self.label.split(" ")]
        return f"{self.index:0{len(str(count - 1))}}-{'-'.join(parts)}"[:_NAME_LENGTH].rstrip("._-")

    def placed(self, path: Path, count: int) -> Point:
        """The point as the run in its own directory of a sweep at ``path``."""
        directory, config = path / self.folder(count), self.plan.config
        plan = replace(self.plan, config=replace(config, run=replace(config.run, dir=str(directory))))
        return replace(self, planned=plan, stored=RunDirectory(directory))


@dataclass(frozen=True, kw_only=True)
class PlannedSweep:
    """A sweep whose points are planned; nothing of it is made yet."""

    recipe: str
    words: tuple[str, ...]
    """The overrides as they were given."""
    dims: str
    """Its size, such as ``parallel.pp (3) x parallel.schedule (2)``."""
    points: tuple[Point, ...]
    """Those that can run, by their index."""
    refused: tuple[Point, ...]
    notes: tuple[str, ...]
    """Of the files that were composed."""
