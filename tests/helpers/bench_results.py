"""Measured results whose times follow a known line."""

from __future__ import annotations

from launcher.bench.model import share, steps
from launcher.contract.bench import OPERATIONS, BenchResult, Measurement, NotMeasured

LATENCY_S, BANDWIDTH = 20e-6, 4e9
SIZES = (4_096, 1_048_576, 16_777_216)


def measurement(operation="all_reduce", num_ranks=2, num_bytes=4_096, link="intra_node", noise=(1.0,)):
    """One whose time is that of a ring over a link of `LATENCY_S` and `BANDWIDTH`, times ``noise``."""
    exact = steps(operation, num_ranks) * LATENCY_S + share(operation, num_ranks) * num_bytes / BANDWIDTH
    return Measurement(
        operation=operation,
        link=link,
        num_ranks=num_ranks,
        num_bytes=num_bytes,
        times_s=tuple(exact * factor for factor in noise),
    )


def result(sizes=SIZES, ranks=(2, 4), not_measured: tuple[NotMeasured, ...] = (), noise=(1.0,)):
    """All operations of all sizes in groups inside a node."""
    return BenchResult(
        backend="gloo",
        device="EPYC",
        hostnames=("one",),
        torch_version="2.13.0",
        measurements=tuple(
            measurement(operation, n, size, noise=noise)
            for n in ranks
            for operation in OPERATIONS
            for size in sizes
        ),
        not_measured=not_measured,
    )
