"""What is measured of collective operations, and what the ranks found: plain data in two JSON files."""

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
"""Every operation, in the order in which they are shown. ``send_recv``: each rank sends to the next one of
a ring and receives from the one before, at once."""
REQUEST_FILE, RESULT_FILE = "bench.json", "measured.json"
"""In the run directory: what the ranks are asked, and what rank 0 writes."""
ELEMENT_BYTES = 4
"""All operations are on fp32."""
Link = Literal["intra_node", "inter_node"]
"""Which link of a cluster the members of a group talk over."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Groups of one size that do the same at the same time."""

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
    """Times that everything is measured, one round after the other."""
    operations: tuple[str, ...] = OPERATIONS


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One operation of one size in groups of one size."""

    operation: str
    link: Link
    num_ranks: int
    num_bytes: int
    """Of the largest buffer that one rank holds for it: what is summed, broadcast or sent; for a gather, a
    scatter, an all-to-all and a reduce-scatter the parts of all ranks together (as nccl-tests counts)."""
    times_s: tuple[float, ...]
    """Seconds of one operation in every round: the mean over some in a row, on the slowest rank."""


@dataclass(frozen=True, kw_only=True)
class NotMeasured:
    """An operation without times, and why."""

    operation: str
    link: Link
    num_ranks: int
    reason: str
    is_wrong: bool
    """Whether it gave a wrong value; else the backend has no such operation."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What the ranks found."""

    backend: str
    """``gloo`` or ``nccl``."""
    device: str
    """Name of rank 0's device."""
    hostnames: tuple[str, ...]
    """Of all ranks, each once."""
    torch_version: str
    measurements: tuple[Measurement, ...]
    not_measured: tuple[NotMeasured, ...]
