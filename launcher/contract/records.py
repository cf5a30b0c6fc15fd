"""The format of what a rank measures: one JSON object a line, in ``metrics/rank-N.jsonl``.

Line 1 is a `Header`; each later line is a `StepRecord`, an `EvalRecord` or a `MemoryRecord`, told apart by
``type``; on a rank that does not train it is a `RoleRecord`.
Times are integers in nanoseconds, so that the kinds of a step sum to the step exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

VERSION = 1
"""Raised when a field changes its meaning."""

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


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step of one rank."""

    type: Literal["step"] = "step"
    step: int
    """0-based."""
    start_ns: int
    """Monotonic clock of the host."""
    duration_ns: int
    kinds_ns: Mapping[str, int]
    """Time by `RANK_KINDS`; sums to ``duration_ns``."""
    collectives_ns: Mapping[str, tuple[int, ...]]
    """Blocked time of every collective in call order, by axis; sums to its entry in ``kinds_ns``."""
    num_receives: int
    """Pipeline messages waited for."""
    compute_ns: tuple[int, ...]
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
    """The gradient overflowed, and the parameters stayed as they were."""
    disagreement: float | None = None
    """Where replicas have weights of their own: how far this rank's were from the average that it took, the
    norm of the difference over that of the average."""


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
    """Step -> one record per entry of ``headers``; only steps that every trainer rank has recorded."""
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
    newest: tuple[StepRecord, ...] = ()
    """The newest step that any rank has made, of each that has made it."""
