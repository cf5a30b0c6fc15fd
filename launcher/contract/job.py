"""A job as text, and its state. No process is started here."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from launcher.typed.read import read_unless, read_while
from launcher.typed.scalars import Ending, Filled, NonNegativeInt, PositiveFloat, PositiveInt, Range
from launcher.typed.trust import OF_READER, READS_FILES

Phase = Literal["pending", "running", "succeeded", "failed", "cancelled"]
"""Phase of a job."""
EXECUTOR_LOG = "logs/executor.log"
"""Output of the process starter, in the run directory."""
OUT_OF_MEMORY = "out of memory"
"""The error type that a rank reports when an allocation fails."""
EXIT = "exit"
"""Folder in the run directory for what the newest start leaves; the next one moves it aside."""
STOP_NOTE = "exit/stopped.json"
"""Written in the run directory by ranks that were asked to stop, once they have saved."""
START_NOTE, END_NOTE = "exit/start.json", "exit/end.json"
"""Written there by whoever starts the ranks: when it did, in seconds since 1970; and by one that follows
them, how they ended."""
JOB_RECORD = "exit/job.json"
"""Written there by the script of a job as it ends: its id and its exit code."""
NODE_NOTE = "exit/unfit"
"""Written there where a start has ended because of its nodes: a sentence."""
FINISHED_NOTE, AGAIN_NOTE = "exit/finished", "exit/again"
"""Written there by the script of a job: nothing is left to train; the run goes on without anybody's help, or
was cancelled, as its text says."""
RESUME_NOTE = "exit/resumed.json"
"""Written there by ranks that resume: the step of the checkpoint, and a sentence for each damaged one."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in the run directory; each has a folder of its own, of `checkpoint_name`."""
CODE, FROZEN_ROOTS = "source/lib", "source/roots"
"""In the directory of a job or of its sweep: the copy of this program, and the folder of those of the user's
folders."""
ENTRY_MODULE = "launcher.runtime.process.main"
"""The module that every rank runs."""
START_FILE = "launcher/runtime/process/start.py"
"""In `CODE`: starts a module of that copy, `python START_FILE MODULE WORD...`."""
RENDEZVOUS_FILE = "TRIREME_RENDEZVOUS_FILE"
"""Variable of the ranks of one host: the file in which they meet, absent or empty at the start. Without it
they meet through the TCPStore of ``MASTER_ADDR`` and ``MASTER_PORT``."""
RENDEZVOUS_KEY = "TRIREME_RENDEZVOUS_KEY"
"""Variable of the ranks of several hosts: what their keys in that store begin with, unknown to others."""
LOCK = "TRIREME_LOCK"
"""Variable of the ranks: the token of the run directory's lock (`launcher.base.lock`), with which they may
write there."""
ONE_HOST = "trireme-one-host"
"""Name of the rendezvous of one process that starts every rank itself: nothing listens."""
SAVE_TIMES = "save_times"
"""File in the run directory: each line begins with the seconds that the ranks need to save and end."""
SECONDARY_EXIT_CODES = (-signal.SIGTERM, -signal.SIGABRT)
"""Exit codes of a rank that ends because another one failed: terminated, or aborted in a collective."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """How the speedup is measured."""

    baseline: str = field(metadata=READS_FILES)
    """``auto``, ``none``, or the directory of a finished run."""
    warmup_steps: NonNegativeInt
    """First steps that no measured number includes. The default is half of ``num_steps`` in a run that is too
    short for it."""
    baseline_steps: PositiveInt = field(default=200, metadata=read_while("report.baseline", "auto"))
    """Most steps that the baseline is measured by: it trains its ``warmup_steps`` and these, or the whole
    training where that is shorter. Losses are compared over them."""
    claims: bool = False
    """Whether what a pipeline's schedule promises is measured and set beside the theory, in a table of its
    own. What autograd holds is then followed through the second step, which has to be warm-up."""

    @property
    def num_baseline_steps(self) -> int:
        """Most steps that the baseline trains."""
        return self.warmup_steps + self.baseline_steps


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run is kept and how long it may hang."""

    dir: str | None = field(metadata=OF_READER)
    """Run directory; null = a new one under ``root``, named after recipe and time."""
    root: Annotated[str, Filled()] = field(metadata=OF_READER)
    """Folder of all runs."""
    timeout_s: Annotated[float, Range(minimum=1, maximum=1_000_000)]
    """Seconds after which a rank ends that has given no sign of life, and with it the job; from its first
    step on."""
    start_timeout_s: Annotated[float, Range(minimum=1, maximum=1_000_000)]
    """Seconds that a rank may take from its start to its first step: libraries, process groups, the model,
    data, a checkpoint. Compilation is a part of the first step."""
    notify: tuple[Annotated[str, Filled()], ...] = field(default=(), metadata=OF_READER)
    """Command, word by word, that is started for each event of the run (``events.jsonl``) and reads it as
    JSON on its input; no shell is between. Empty = none."""
    notify_timeout_s: PositiveFloat = field(default=30.0, metadata=read_unless("run.notify", ()))
    """Seconds after which that command is killed. Whether it fails changes nothing in the run."""
    prometheus: Annotated[str, Ending(".prom")] | None = field(default=None, metadata=OF_READER)
    """File that the figures of the run are written into every 15 s, for the textfile collector of Prometheus'
    node_exporter; those of a scheduler's job by its first node. A relative path is one in the run directory;
    null = none."""


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
class RankEnd:
    """How the process of a rank ended, as its starter tells."""

    rank: int
    exit_code: int
    """Below 0: a signal."""
    reason: str


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
    ends: tuple[RankEnd, ...] = field(default=(), compare=False, repr=False)
    """Of a failed job, the ranks that did not end well, the first to be told of first."""


def lead_s(*, step_s: float, save_s: float, num_saves: int) -> int:
    """Seconds that ranks need to save and end: a step, ``num_saves`` saves, half as much again, and 30 s
    until all have heard of it and the job is back in the queue.

    >>> lead_s(step_s=2.0, save_s=40.0, num_saves=2)
    153
    """
    return math.ceil(1.5 * (step_s + num_saves * save_s)) + 30


def needed_lead_s(run_dir: Path) -> int:
    """Seconds that the ranks of a run need to save and end, by all that it has measured; 0: not known."""
    with suppress(OSError):
        lines = (run_dir / SAVE_TIMES).read_text(encoding="utf-8", errors="replace").splitlines()
        return max((int(word) for line in lines if (word := line.partition(" ")[0]).isdecimal()), default=0)
    return 0


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


def of_start(name: str, start: str) -> str:
    """A file of the folder ``exit``, in that of a start that was moved aside."""
    return f"{start}/{Path(name).name}"


def error_name(rank: int) -> str:
    """The file of the error of a rank that failed, inside the run directory."""
    return f"exit/rank-{rank}.json"


def rank_words(run_dir: str) -> tuple[str, str]:
    """What the command line of every rank of a run has, and that of no other process but its starter."""
    return ENTRY_MODULE, f"{run_dir}/plan.json"


def process_name(rank: int) -> str:
    """The file that tells which process a rank is, in the run directory; absent once it has ended well."""
    return f"exit/rank-{rank}.process"


def checkpoint_name(step: int) -> str:
    """The folder of the checkpoint after a step, inside `CHECKPOINTS`."""
    return f"step-{step:08d}"
