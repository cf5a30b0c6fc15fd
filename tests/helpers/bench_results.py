"""Measured results whose times follow a known line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from launcher.base.arithmetic import ring_share, ring_steps
from launcher.contract.bench import OPERATIONS, BenchResult, Measurement, NotMeasured

LATENCY_S, BANDWIDTH = 20e-6, 4e9
SIZES = (4_096, 1_048_576, 16_777_216)


def measurement(
    operation: str = "all_reduce",
    num_ranks: int = 2,
    num_bytes: int = 4_096,
    link: Literal["intra_node", "inter_node"] = "intra_node",
    noise: Sequence[float] = (1.0,),
) -> Measurement:
    """One whose time is that of a ring over a link of `LATENCY_S` and `BANDWIDTH`, times ``noise``."""
    exact = (
        ring_steps(operation, num_ranks) * LATENCY_S
        + ring_share(operation, num_ranks) * num_bytes / BANDWIDTH
    )
    return Measurement(
        operation=operation,
        link=link,
        num_ranks=num_ranks,
        num_bytes=num_bytes,
        times_s=tuple(exact * factor for factor in noise),
    )


def result(
    sizes: Sequence[int] = SIZES,
    ranks: Sequence[int] = (2, 4),
    not_measured: tuple[NotMeasured, ...] = (),
    noise: Sequence[float] = (1.0,),
) -> BenchResult:
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
