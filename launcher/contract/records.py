"""The format of what a rank measures: one JSON object a line.

    metrics/rank-N.jsonl        steps since the last window, all of them
    metrics/sums/rank-N.jsonl   everything else, and a `WindowRecord` for every `WINDOW_STEPS` steps
    metrics/whole/rank-N-*      the steps of the newest `KEPT_WINDOWS` windows, a file for each

A start begins with a `Header` in both of the first two, and a later file of its steps with a `SegmentRecord`.
Each other line is a `StepRecord`, an `EvalRecord`, a `MemoryRecord` or a `WindowRecord`, told apart by
``type``; on a rank that does not train it is a `RoleRecord`. All but steps (and what a role's own windows sum
up) is in the second file, evaluations and the like in the first as well. Earlier versions wrote all of it to
the first.

So a rank keeps the steps of the newest `KEPT_WINDOWS` windows and of those since, 7 MB where a step takes 640
bytes, and of every window a line, 1 KB to 2 KB: 0.5 MB to 1 MB of 500,000 steps.

What is measured is in integer nanoseconds of a monotonic clock, so that the kinds of a step sum to the step
exactly. ``time`` is the wall clock when the line was written, ISO 8601 in UTC, to find it beside what others
log: nothing is computed from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

VERSION = 1
"""Raised when a field changes its meaning."""
WINDOW_STEPS = 1000
"""Windows end before the steps that this divides. Long enough that their sums are few, short enough that what
is whole since the last one is read in seconds."""
KEPT_WINDOWS = 10
"""Windows whose steps are kept whole, beside their sums."""

COMPUTE, REPLICATED, SINGLE_RANK, PIPELINE, SERVER, INPUT, OTHER = (
    "compute",
    "replicated",
    "single_rank",
    "pipeline",
    "server_wait",
    "input_wait",
    "other",
)
COLLECTIVE_KINDS = ("tp", "dp", "model", "tied")
"""Blocked in a collective over that group of ranks.

tp     ranks that differ only in tp_rank
dp     ranks that differ only in dp_rank
model  all ranks of one replica (equal dp_rank), such as for the gradient norm
tied   ranks of the first and the last stage that share tied weights: equal dp_rank and tp_rank,
       and only those ranks have entries of this kind
"""
RANK_KINDS = (COMPUTE, REPLICATED, SINGLE_RANK, PIPELINE, SERVER, INPUT, *COLLECTIVE_KINDS, OTHER)
"""What one rank can tell on its own.

compute      forward and backward
replicated   the same work on every data-parallel rank: optimizer, clipping
single_rank  evaluation, checkpoint and log, while others may wait
pipeline     handing over or waiting for activations and gradients between stages
server_wait  blocked until ranks that serve have answered: messages, their work, and what they wait for
input_wait   blocked until the loader has the batch
other        the rest of the step
"""
TRANSFER, PEER_WAIT, PIPELINE_WAIT = "transfer", "peer_wait", "pipeline_wait"
REPORT_KINDS = (COMPUTE, REPLICATED, SINGLE_RANK, TRANSFER, PEER_WAIT, PIPELINE_WAIT, SERVER, INPUT, OTHER)
"""What the reader makes of all ranks' records together: the time in a collective is split, per
instance, into ``transfer`` (the shortest time any member spent in it) and ``peer_wait`` (the rest);
``pipeline`` is split into ``transfer`` (at most the calibrated time of its messages) and
``pipeline_wait`` (the rest)."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """Who measured, on what."""

    type: Literal["header"] = "header"
    version: int = VERSION
    rank: int
    """Global rank."""
    role: str
    """``trainer``, or the role an architecture adds."""
    pp_rank: int
    dp_rank: int
    tp_rank: int
    hostname: str
    device: str
    """Device name, such as a CPU model."""
    num_threads: int
    """Intra-op threads of this rank."""
    num_cores: int
    """Cores that this process may use, shared by all ranks of the node."""
    torch_version: str
    p2p_latency_ns: int
    """Calibrated time of one pipeline message of this rank; 0 without a pipeline."""
    start: int | None = None
    """Which start of the ranks it is, from 1; None in records of earlier versions."""
    newest_step: int | None = None
    """The newest step that the rank had recorded before it; -1: none."""
    num_lost_steps: int | None = None
    """Steps that had been lost before it, with starts that made them and were not the last."""
    time: str = ""


@dataclass(frozen=True, kw_only=True)
class SegmentRecord:
    """The first line of a file that goes on with the steps of a start."""

    type: Literal["segment"] = "segment"
    start: int
    newest_step: int
    """The newest step before the file."""
    time: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step of one rank. It can be read as a window of one step."""

    type: Literal["step"] = "step"
    step: int
    """0-based."""
    start_ns: int
    """Monotonic clock of the host."""
    duration_ns: int
    kinds_ns: Mapping[str, int]
    """Time by `RANK_KINDS`; sums to ``duration_ns``."""
    collectives_ns: Mapping[str, Sequence[int]]
    """Blocked time of every collective in call order, by axis; sums to its entry in ``kinds_ns``."""
    num_receives: int
    """Pipeline messages waited for."""
    compute_ns: Sequence[int]
    """Compute time of each F and B in the order of the rank's action list."""
    num_tokens: int
    """Tokens of the global batch, as `launcher.contract.plan.BatchPlan` counts them."""
    num_samples: int
    """Samples of the global batch."""
    loss: float | None = None
    """Mean loss over the global batch, on the ranks of the last stage."""
    grad_norm: float | None = None
    """Norm of the whole model's gradient before clipping; None where it overflowed."""
    lr: float | None = None
    first_backward_ns: int | None = None
    """From the start of the step to that of its first B."""
    is_skipped: bool = False
    """The gradient overflowed, or an alarm had the batch skipped: the parameters stayed as they were."""
    disagreement: float | None = None
    """Where replicas have weights of their own: how far this rank's were from the average that it took, the
    norm of the difference over that of the average."""
    time: str = ""

    @property
    def first_step(self) -> int:
        """The step."""
        return self.step

    @property
    def num_steps(self) -> int:
        """1."""
        return 1

    @property
    def last_start_ns(self) -> int:
        """When it began."""
        return self.start_ns

    @property
    def last_duration_ns(self) -> int:
        """What it took."""
        return self.duration_ns

    @property
    def num_skipped(self) -> int:
        """1 where it was skipped."""
        return int(self.is_skipped)

    @property
    def own_ns(self) -> int:
        """What it took without waiting for servers."""
        return self.duration_ns - self.kinds_ns.get(SERVER, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRecord:
    """Steps of one rank that follow each other, summed: it is of one start, of its warm-up or of the rest.

    Fields have the names and the meaning of those of a `StepRecord`, as sums where nothing else is said.
    """

    type: Literal["window"] = "window"
    first_step: int
    num_steps: int
    start_ns: int
    """When the first step began, by the monotonic clock of the host."""
    last_start_ns: int
    """When the last step began."""
    last_duration_ns: int
    """What the last step took."""
    duration_ns: int
    kinds_ns: Mapping[str, int]
    shortest_ns: Mapping[str, int | None]
    """By `COLLECTIVE_KINDS`, over all calls the shortest time that any member of the group spent in one; of
    ``pipeline`` over all steps the calibrated time of their messages, at most the time that was waited. None
    where the members made different numbers of calls."""
    num_receives: int
    compute_ns: Sequence[int]
    """For each F and B, the median over the steps."""
    num_tokens: int
    num_samples: int
    loss: float | None = None
    """Of the last step."""
    disagreement: float | None = None
    """Of the last step."""
    loss_sum: float = 0.0
    """Over the steps that have a finite loss."""
    num_losses: int = 0
    """Steps that have a finite loss."""
    first_backward_ns: int | None = None
    """The median over the steps."""
    own_ns: int = 0
    """What a step took without waiting for servers: the median over the steps."""
    num_skipped: int = 0
    time: str = ""

    @property
    def step(self) -> int:
        """The last step."""
        return self.first_step + self.num_steps - 1


Part = StepRecord | WindowRecord
"""What one rank measured in one step, or in the steps of a window."""


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation, written by the ranks of the last stage."""

    type: Literal["eval"] = "eval"
    step: int
    """Steps done when it was made."""
    loss: float
    """Mean loss over the evaluated targets."""
    num_tokens: int
    """Targets that the loss counts."""
    time: str = ""


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """What a rank held, written when it has trained to the end."""

    type: Literal["memory"] = "memory"
    step: int
    """Steps done when it was written."""
    states_bytes: int
    """Live tensors between the schedule of a step and its update: weights, gradients, optimizer state, and
    buffers that wait to be used again."""
    peak_bytes: int
    """The most in use since before the model was built: on CUDA what the allocator gave out, on a CPU the
    growth of the process's resident memory, libraries included."""
    held_peak_bytes: int | None = None
    """The most that autograd, and products that a split backward put off, held at once during the schedule
    of one step, each storage once, parameters not at all; None where that was not followed."""
    held_total_bytes: int | None = None
    """The sum over all storages that autograd came to hold in that step."""
    grown_bytes: int | None = None
    """On a CPU, the most that the process's resident memory grew by since the model was built."""
    time: str = ""


@dataclass(frozen=True, kw_only=True)
class RoleRecord:
    """What a rank that does not train writes of its work, in the words of the plugin whose role it has."""

    type: str
    """Any but those of the other records."""
    values: Mapping[str, int | None]
    """Counts, and times in nanoseconds, by name: in the file they stand beside ``type``."""


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """What all ranks of one run measured since its newest start."""

    headers: tuple[Header, ...]
    """Of the trainer ranks, ascending by rank."""
    steps: Mapping[int, tuple[StepRecord, ...]]
    """Step -> one record per entry of ``headers``; only steps that every trainer rank has recorded, and that
    are in none of ``windows``."""
    evals: tuple[EvalRecord, ...]
    """One per evaluated step, ascending, from all starts of the run."""
    num_torn_lines: int
    """Lines that a killed rank left half written."""
    num_incomplete_steps: int
    """Steps that some rank recorded and another did not."""
    num_starts: int
    """1, and 1 more for every time the run was resumed."""
    num_lost_steps: int = 0
    """Steps that were made, lost with the start that made them, and made again or still to be."""
    memory: Mapping[int, MemoryRecord] = field(default_factory=dict)
    """Rank -> what it held, where it trained to the end."""
    roles: Mapping[int, tuple[RoleRecord, ...]] = field(default_factory=dict)
    """Rank that does not train -> its records, in the order in which they were written."""
    newest: tuple[Part, ...] = ()
    """What ends with the newest step that any rank has made, of each that has made it."""
    windows: tuple[tuple[WindowRecord, ...], ...] = ()
    """Ascending, each with one record per entry of ``headers``: the sums of the steps before ``steps``."""

    @property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """All steps, ascending: windows, then single ones."""
        return (*self.windows, *self.steps.values())

    @property
    def num_steps(self) -> int:
        """Steps that every trainer rank has recorded."""
        return sum(rows[0].num_steps for rows in self.windows) + len(self.steps)


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a rank, as far as it tells which steps were lost."""

    newest_before: int | None = None
    """`Header.newest_step`."""
    lost_before: int | None = None
    """`Header.num_lost_steps`."""
    first_step: int | None = None
    """That it made; None: none is known."""
    last_step: int = -1


def newest_and_lost(starts: Iterable[Start]) -> tuple[int, int]:
    """The newest step after some starts that followed each other, and the number of steps that were lost.

    >>> newest_and_lost([Start(first_step=0, last_step=9), Start(first_step=8, last_step=8)])
    (8, 2)
    """
    newest, lost = -1, 0
    for start in starts:
        newest = newest if start.newest_before is None else start.newest_before
        lost = lost if start.lost_before is None else start.lost_before
        if start.first_step is not None:
            lost += max(0, newest + 1 - start.first_step)
            newest = start.last_step
    return newest, lost
