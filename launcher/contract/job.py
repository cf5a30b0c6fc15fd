"""A job as text, and how it stands. No process is touched here."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["pending", "running", "succeeded", "failed", "cancelled"]
"""How a job stands."""
EXECUTOR_LOG = "logs/executor.log"
"""Where in the run directory a local executor keeps what the process starter prints."""
OUT_OF_MEMORY = "out of memory"
"""What a rank whose allocation failed says that it ended of."""
STOP_NOTE = "exit/stopped.json"
"""What ranks that were told to end leave in the run directory once they have saved."""
RESUME_NOTE = "exit/resumed.json"
"""What ranks that go on from a checkpoint leave there: its step, and a sentence for each that is damaged."""
SECONDARY_EXIT_CODES = (-signal.SIGTERM, -signal.SIGABRT)
"""How a rank ends because another one did: told to stop, or aborted by a broken collective."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Where a plan is to be run."""

    run_dir: str
    """Absolute path of the run directory, which holds plan.json."""
    plan_sha256: str
    """Hash of plan.json, checked by every rank."""
    python: str
    """Absolute path of the interpreter."""
    resume: bool = False
    """Whether the ranks go on from the newest checkpoint in the run directory."""
    after: str = ""
    """Id of a job that has to end before this one begins."""
    code: str = ""
    """Absolute path of the folder that the ranks import this program from; empty: where it is installed."""


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """What starts the job."""

    argv: tuple[str, ...]
    """The command, word by word; nothing passes through a shell."""
    environment: Mapping[str, str]
    """Variables set for it beside the inherited ones."""
    run_dir: str
    text: str = ""
    """The batch script, for schedulers that take one."""
    num_jobs: int = 1
    """Jobs that it is submitted as; each waits for the one before, and goes on where that one saved."""
    max_restarts: int = 0
    """Times that whoever follows the job starts it again after a failure."""
    save_wait_s: float = 0
    """Seconds that whoever follows the job waits for ranks that are told to save and end; 0: none do."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """Where several jobs are to be started as the tasks of one."""

    name: str
    folder: str
    """Absolute path of a folder in which N leads to the run directory of task N."""
    script: str
    """Absolute path that the script will be at."""
    tasks: tuple[int, ...]
    """Numbers of the tasks, ascending, one for each job."""
    at_once: int | None = None
    """Tasks that may run at a time; None: all."""


@dataclass(frozen=True, kw_only=True)
class JobHandle:
    """A started job."""

    id: str
    """Process id or job id."""
    run_dir: str
    process: Any = field(default=None, compare=False, repr=False)
    """The live process of a local job."""
    notes: tuple[str, ...] = ()
    """What the reader should know about the submission, each a sentence."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """How a job stands."""

    phase: Phase
    exit_code: int | None = None
    """Of the rank that ended first where that is known, else of the job; negative: a signal."""
    reason: str = ""
    rank: int | None = None
    """The rank that ended first, where the executor knows it."""
    since_s: float | None = field(default=None, compare=False, repr=False)
    """When it came to stand so, in seconds since the epoch; None: when that was noticed."""
