"""A job as text, and its state. No process is started here."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["pending", "running", "succeeded", "failed", "cancelled"]
"""Phase of a job."""
EXECUTOR_LOG = "logs/executor.log"
"""Output of the process starter, in the run directory."""
OUT_OF_MEMORY = "out of memory"
"""The error type that a rank reports when an allocation fails."""
STOP_NOTE = "exit/stopped.json"
"""Written in the run directory by ranks that were asked to stop, once they have saved."""
RESUME_NOTE = "exit/resumed.json"
"""Written there by ranks that resume: the step of the checkpoint, and a sentence for each damaged one."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in the run directory; each has a folder of its own, of `checkpoint_name`."""
RENDEZVOUS_FILE = "TRIREME_RENDEZVOUS_FILE"
"""Variable of the ranks of one host: the file in which they meet, absent or empty at the start. Without it
they meet through the TCPStore of ``MASTER_ADDR`` and ``MASTER_PORT``."""
RENDEZVOUS_KEY = "TRIREME_RENDEZVOUS_KEY"
"""Variable of the ranks of several hosts: what their keys in that store begin with, unknown to others."""
ONE_HOST = "trireme-one-host"
"""Name of the rendezvous of one process that starts every rank itself: nothing listens."""
SECONDARY_EXIT_CODES = (-signal.SIGTERM, -signal.SIGABRT)
"""Exit codes of a rank that ends because another one failed: terminated, or aborted in a collective."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Where and how to run a plan."""

    run_dir: str
    """Absolute path of the run directory, which holds plan.json."""
    plan_sha256: str
    """Hash of plan.json, checked by every rank."""
    python: str
    """Absolute path of the interpreter."""
    resume: bool = False
    """Whether the ranks resume from the newest checkpoint in the run directory."""
    after: str = ""
    """Id of a job that this one waits for; empty: none."""
    code: str = ""
    """Absolute path of the folder that the ranks import this program from; empty: where it is installed."""


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """What starts the job."""

    argv: tuple[str, ...]
    """The command, word by word; nothing passes through a shell."""
    environment: Mapping[str, str]
    """Variables set in addition to the inherited ones."""
    run_dir: str
    text: str = ""
    """The batch script, for schedulers that take one."""
    num_jobs: int = 1
    """Jobs in the chain that it is submitted as; each resumes from the checkpoint of the one before."""
    max_restarts: int = 0
    """Restarts after a failure, by the process that follows the job."""
    save_wait_s: float = 0
    """Seconds to wait for ranks to save when they are asked to stop; 0: they do not save."""


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """Where several jobs are to be started as the tasks of one job array."""

    name: str
    folder: str
    """Absolute path of a folder in which ``N`` is a link to the run directory of task N."""
    script: str
    """Absolute path that the script will have."""
    tasks: tuple[int, ...]
    """Numbers of the tasks, ascending, one for each job."""
    at_once: int | None = None
    """Largest number of tasks that run at a time; None: all."""


@dataclass(frozen=True, kw_only=True)
class JobHandle:
    """A started job."""

    id: str
    """Process id or job id."""
    run_dir: str
    process: Any = field(default=None, compare=False, repr=False)
    """The live process of a local job."""
    notes: tuple[str, ...] = ()
    """Remarks on the submission, each a sentence."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job."""

    phase: Phase
    exit_code: int | None = None
    """Of the rank that failed first where that is known, else of the job; negative: a signal."""
    reason: str = ""
    rank: int | None = None
    """The rank that failed first, where the executor knows it."""
    since_s: float | None = field(default=None, compare=False, repr=False)
    """When it entered this phase, in seconds since the epoch; None: when that was noticed."""


def log_name(rank: int) -> str:
    """The file of what a rank prints, inside the run directory."""
    return f"logs/rank-{rank}.log"


def records_name(rank: int) -> str:
    """The file of what a rank measures, inside the run directory: its steps since the last window."""
    return f"metrics/rank-{rank:05d}.jsonl"


def sums_name(rank: int) -> str:
    """The file of what a rank measured, with sums in place of steps, inside the run directory."""
    return f"metrics/sums/rank-{rank:05d}.jsonl"


def whole_name(rank: int, start: int, newest_step: int) -> str:
    """The file of the steps of a window, the last of them ``newest_step``, inside the run directory.

    Names of a rank ascend as its steps were made.
    """
    return f"metrics/whole/rank-{rank:05d}-start-{start:04d}-step-{newest_step:09d}.jsonl"


def error_name(rank: int) -> str:
    """The file of the error of a rank that failed, inside the run directory."""
    return f"exit/rank-{rank}.json"


def checkpoint_name(step: int) -> str:
    """The folder of the checkpoint after a step, inside `CHECKPOINTS`."""
    return f"step-{step:08d}"
