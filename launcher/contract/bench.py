"""The request and the result of a measurement of collectives: plain data in two JSON files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OPERATIONS = (
    "broadcast",
    "scatter",
    "reduce",
    "all_reduce",
    "gather",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
)
"""Every operation, in the order of the tables. ``send_recv``: each rank of a ring sends to the next one
while it receives from the previous one."""
REQUEST_FILE, RESULT_FILE = "bench.json", "measured.json"
"""In the run directory: read by the ranks, and written by rank 0."""
ELEMENT_BYTES = 4
"""All operations are on fp32."""
Link = Literal["intra_node", "inter_node"]
"""The link of a cluster that connects the members of a group."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Groups of one size that run the same operation at the same time."""

    link: Link
    groups: tuple[tuple[int, ...], ...]
    """The members of each group; no rank is in two."""

    @property
    def num_ranks(self) -> int:
        """Members of each group."""
        return len(self.groups[0])


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What the ranks are to measure."""

    sizes: tuple[int, ...]
    """Bytes, by the definitions of `Measurement`."""
    placements: tuple[Placement, ...]
    num_rounds: int
    """Repetitions of the whole measurement."""
    operations: tuple[str, ...] = OPERATIONS


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One operation of one size in groups of one size."""

    operation: str
    link: Link
    num_ranks: int
    num_bytes: int
    """Size of the largest buffer of one rank: what is reduced, broadcast or sent; for gather, all-gather,
    scatter, all-to-all and reduce-scatter the shards of all ranks together (as in nccl-tests)."""
    times_s: tuple[float, ...]
    """Seconds per operation in every round: the mean over several back to back, on the slowest rank."""


@dataclass(frozen=True, kw_only=True)
class NotMeasured:
    """An operation without times, with the reason."""

    operation: str
    link: Link
    num_ranks: int
    reason: str
    is_wrong: bool
    """Whether the result was wrong; else the backend does not support the operation."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What the ranks measured."""

    backend: str
    """``gloo`` or ``nccl``."""
    device: str
    """Name of rank 0's device."""
    hostnames: tuple[str, ...]
    """Distinct hostnames of all ranks."""
    torch_version: str
    measurements: tuple[Measurement, ...]
    not_measured: tuple[NotMeasured, ...]
