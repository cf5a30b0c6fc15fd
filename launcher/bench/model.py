"""Bandwidths of a measured operation, and the latency and bandwidth fitted to its times.

    algorithm bandwidth = size / time
    bus bandwidth       = algorithm bandwidth * the share of the size that each link carries (`ring_share`)

A line is fitted to the times: of one operation  latency + size / bandwidth, of a link
steps * latency + share * size / bandwidth  over all the operations in `PLANNED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from launcher.base.arithmetic import ring_share, ring_steps
from launcher.contract.bench import Link, Measurement

PLANNED = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
"""The operations that plans predict, to which a link is fitted."""


def time_s(measured: Measurement) -> float:
    """The median over the rounds."""
    return median(measured.times_s)


def algorithm_bandwidth(measured: Measurement) -> float:
    """Bytes per second of the whole operation."""
    return measured.num_bytes / time_s(measured)


def bus_bandwidth(measured: Measurement) -> float:
    """Bytes per second over each link, comparable between operations and group sizes."""
    return ring_share(measured.operation, measured.num_ranks) * algorithm_bandwidth(measured)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The line time = num_steps * latency + num_bytes / bandwidth through measured times, with its error."""

    latency_s: float
    latency_error_s: float
    """Half the range over the lines fitted to each round."""
    bandwidth: float
    """Bytes per second; infinite where the times do not grow with the size."""
    bandwidth_error: float
    """As ``latency_error_s``."""
    misfit: float
    """Median relative distance of the line from the times."""
    worst_misfit: float
    """Largest relative distance."""


Point = tuple[float, float, Sequence[float]]
"""Steps, bytes, and the time in each round."""


def operation_fit(measured: Sequence[Measurement]) -> Fit | None:
    """The line of one operation in groups of one size; None where all sizes are similar."""
    points = [(1, m.num_bytes, m.times_s) for m in measured]
    return fit(points) if has_range(m.num_bytes for m in measured) else None


def link_fit(measured: Iterable[Measurement], link: Link) -> Fit | None:
    """The latency and bandwidth of a link, as plans use them; None as for `operation_fit`."""
    rows = [m for m in measured if m.link == link and m.operation in PLANNED]
    points = [
        (ring_steps(m.operation, m.num_ranks), ring_share(m.operation, m.num_ranks) * m.num_bytes, m.times_s)
        for m in rows
    ]
    return fit(points) if has_range(m.num_bytes for m in rows) else None


def has_range(num_bytes: Iterable[int]) -> bool:
    """Whether the sizes differ enough to separate latency from bandwidth.

    >>> has_range([4096, 8192]), has_range([4096, 5000]), has_range([])
    (True, False, False)
    """
    sizes = list(num_bytes)
    return bool(sizes) and max(sizes) >= 2 * min(sizes)


def fit(points: Sequence[Point]) -> Fit:
    """The line with the least squared relative distances from the median times, so that short and long times
    weigh the same."""
    latency, bandwidth = _line([(count, num_bytes, median(times)) for count, num_bytes, times in points])
    rounds = [
        _line([(count, num_bytes, time) for (count, num_bytes, _), time in zip(points, times, strict=True)])
        for times in zip(*(times for _, _, times in points), strict=True)
    ]
    latencies, bandwidths = zip(*rounds, strict=True)
    distances = [
        abs((count * latency + num_bytes / bandwidth) / median(times) - 1)
        for count, num_bytes, times in points
    ]
    return Fit(
        latency_s=latency,
        latency_error_s=(max(latencies) - min(latencies)) / 2,
        bandwidth=bandwidth,
        bandwidth_error=(max(bandwidths) - min(bandwidths)) / 2 if max(bandwidths) < inf else inf,
        misfit=median(distances),
        worst_misfit=max(distances),
    )


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Latency and bandwidth of the best line, neither of them negative.

    >>> [round(number, 9) for number in _line([(1, 0, 3.0), (1, 10, 5.0), (2, 10, 8.0)])]
    [3.0, 5.0]
    """
    rows = [(count / time, num_bytes / time) for count, num_bytes, time in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    latency = (a * bb - b * ab) / determinant if determinant else -1.0
    per_byte = (b * aa - a * ab) / determinant if determinant else -1.0
    if latency < 0:
        latency, per_byte = 0.0, b / bb
    elif per_byte <= 0:
        latency, per_byte = a / aa, 0.0
    return latency, 1 / per_byte if per_byte else inf
