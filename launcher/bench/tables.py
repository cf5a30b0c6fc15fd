"""Measurements of collectives as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import Any

from launcher.base.columns import columns
from launcher.base.units import counted, format_bytes, format_duration
from launcher.bench.model import (
    PLANNED,
    Fit,
    algorithm_bandwidth,
    bus_bandwidth,
    link_fit,
    operation_fit,
    time_s,
)
from launcher.contract.bench import OPERATIONS, BenchResult, Link, Measurement
from launcher.typed.read import plain

WHERE: dict[Link, str] = {"intra_node": "inside a node", "inter_node": "between nodes"}
"""Text for each link."""
_INDENT = "  "


def result_text(result: BenchResult) -> str:
    """All tables."""
    rounds = max((len(m.times_s) for m in result.measurements), default=0)
    hosts = ", ".join(result.hostnames)
    blocks = [
        f"{result.backend} (torch {result.torch_version}) on {result.device}, {hosts}\n"
        f"Times are medians over {counted(rounds, 'round')}, each on the slowest rank; all results were "
        "checked first."
    ]
    for link, num_ranks in groups(result):
        rows = by_operation(result, link, num_ranks)
        heading = f"{counted(num_ranks, 'rank')} {WHERE[link]}"
        blocks.append(_block(f"{heading}: time of one operation", columns(list(_times(rows)))))
        blocks.append(_block(f"{heading}: bandwidth, and the line fitted to the times", _bandwidths(rows)))
    if notes := list(not_measured_lines(result)):
        blocks.append(_block("Not measured", notes))
    blocks.append(_block("Links, as plans use them", list(_links(result))))
    return "\n\n".join(blocks) + "\n"


def groups(result: BenchResult) -> list[tuple[Link, int]]:
    """Link and size of every kind of group, in the order of measurement."""
    return list(dict.fromkeys((m.link, m.num_ranks) for m in result.measurements))


def links(result: BenchResult) -> dict[Link, Fit]:
    """The fit of every link with enough measurements."""
    found = {link: link_fit(result.measurements, link) for link in WHERE}
    return {link: fit for link, fit in found.items() if fit is not None}


def not_measured_lines(result: BenchResult) -> Iterator[str]:
    """Each operation without times, with the reason."""
    for missing in result.not_measured:
        where = f"{counted(missing.num_ranks, 'rank')} {WHERE[missing.link]}"
        yield f"{missing.operation}, {where}: {missing.reason}"


def json_text(result: BenchResult) -> str:
    """All measurements and fits. Units: seconds, bytes, bytes per second."""
    document = {
        "result": plain(result),
        "measurements": [_row(m) for m in result.measurements],
        "operations": [
            {"operation": operation, "link": link, "num_ranks": num_ranks, **_fit_values(fit)}
            for link, num_ranks in groups(result)
            for operation, rows in by_operation(result, link, num_ranks).items()
            if (fit := operation_fit(rows)) is not None
        ],
        "links": {link: _fit_values(fit) for link, fit in links(result).items()},
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def by_operation(result: BenchResult, link: Link, num_ranks: int) -> dict[str, list[Measurement]]:
    """The measurements in groups of one kind, by operation."""
    rows = [m for m in result.measurements if (m.link, m.num_ranks) == (link, num_ranks)]
    found = {operation: [m for m in rows if m.operation == operation] for operation in OPERATIONS}
    return {operation: own for operation, own in found.items() if own}


def _block(heading: str, lines: Sequence[str]) -> str:
    return "\n".join([heading, *(f"{_INDENT}{line}" for line in lines)])


def _times(rows: Mapping[str, Sequence[Measurement]]) -> Iterator[list[str]]:
    sizes = sorted({m.num_bytes for own in rows.values() for m in own})
    yield ["operation", *map(format_bytes, sizes)]
    for operation, own in rows.items():
        times = {m.num_bytes: format_duration(time_s(m)) for m in own}
        yield [operation, *(times.get(size, "-") for size in sizes)]


def _bandwidths(rows: Mapping[str, Sequence[Measurement]]) -> list[str]:
    table = [["operation", "algbw", "busbw", "latency", "bandwidth", "off by"]]
    for operation, own in rows.items():
        largest = max(own, key=lambda m: m.num_bytes)
        fit = operation_fit(own)
        cells = _fit_cells(fit) if fit else ["-", "-", "-"]
        table.append([operation, _rate(algorithm_bandwidth(largest)), _rate(bus_bandwidth(largest)), *cells])
    size = format_bytes(max(m.num_bytes for own in rows.values() for m in own))
    return [
        *columns(table),
        f"algbw = size / time and busbw = algbw * the share that each link carries, both at {size};",
        "time = latency + size / bandwidth; off by: median (and largest) relative error",
    ]


def _links(result: BenchResult) -> Iterator[str]:
    found = links(result)
    if not found:
        yield "none: a fit needs two sizes of an operation that plans use"
        return
    table = [["link", "latency", "bandwidth", "off by"]]
    table += [[WHERE[link], *_fit_cells(fit)] for link, fit in found.items()]
    yield from columns(table)
    yield f"one line for {', '.join(PLANNED)} in all group sizes, as rings:"
    yield "time = steps * latency + share of the size that a link carries / bandwidth"


def _fit_cells(fit: Fit) -> list[str]:
    latency, error = format_duration(fit.latency_s), format_duration(fit.latency_error_s)
    rate, spread = _rate(fit.bandwidth), _rate(fit.bandwidth_error)
    return [
        f"{latency} ± {error}",
        f"{rate} ± {spread}" if fit.bandwidth < inf else rate,
        f"{fit.misfit:.0%} ({fit.worst_misfit:.0%})",
    ]


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s" if isfinite(bytes_per_s) else "no limit measured"


def _row(measured: Measurement) -> dict[str, Any]:
    fields = {name: value for name, value in plain(measured).items() if name != "times_s"}
    return {
        **fields,
        "time_s": time_s(measured),
        "algorithm_bandwidth": algorithm_bandwidth(measured),
        "bus_bandwidth": bus_bandwidth(measured),
    }


def _fit_values(fit: Fit) -> dict[str, float | None]:
    """A bandwidth without a limit is null."""
    return {name: value if isfinite(value) else None for name, value in plain(fit).items()}
