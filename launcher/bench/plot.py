"""Plots bus bandwidth over size as a stand-alone SVG: a panel for each kind of group.

Both axes are logarithmic. The nine lines are distinguished by colour, by dashes, and by their names at the
right ends, which are in the order of the lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from launcher.base.units import counted, format_bytes
from launcher.bench.model import bus_bandwidth
from launcher.bench.tables import WHERE, by_operation, groups
from launcher.contract.bench import OPERATIONS, BenchResult, Measurement

_COLORS = ("#185a9d", "#d98a1f", "#46a082", "#8a4f9e", "#c0392b", "#1c2530", "#6c8ebf", "#997a2e", "#7f8c8d")
_DASHES = ("", "7 3", "2 3")
_WIDTH, _HEIGHT, _NAMES = 420, 260, 120
"""Of a panel's axes, and the width for names beside them."""
_LEFT, _TOP, _GAP, _BOTTOM = 78, 96, 92, 60
_LINE_HEIGHT = 15
_STYLE = (
    "text{font:12px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#1c2530}"
    "text.title{font-size:17px;font-weight:600}text.head{font-weight:600}.grey text,text.grey{fill:#5a6572}"
    ".middle text{text-anchor:middle}.end text{text-anchor:end}"
)


def svg_text(result: BenchResult) -> str:
    """The plot of all measurements."""
    kinds = groups(result)
    panel = _WIDTH + _NAMES + _GAP
    width, height = _LEFT + panel * max(1, len(kinds)) - _GAP // 2, _TOP + _HEIGHT + _BOTTOM
    scale = _scale(result.measurements)
    sizes = [m.num_bytes for m in result.measurements]
    span = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}" if sizes else "nothing"
    summary = f"{result.backend} on {result.device} · {', '.join(result.hostnames)} · {span}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>{_STYLE}</style>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="{_LEFT}" y="30">Bus bandwidth of collective operations</text>',
        f'<text class="grey" x="{_LEFT}" y="50">{escape(summary)}</text>',
    ]
    for number, (link, num_ranks) in enumerate(kinds):
        lines = by_operation(result, link, num_ranks)
        heading = f"{counted(num_ranks, 'rank')} {WHERE[link]}"
        parts.append(f'<g transform="translate({_LEFT + number * panel} {_TOP})">')
        parts.append(f'<text class="head" x="0" y="-14">{escape(heading)}</text>')
        parts += [*scale.axes(), *_curves(scale, lines), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Positions in pixels; sizes and bandwidths as powers of ten of bytes and bytes per second."""

    first_size: float
    last_size: float
    lowest: int
    highest: int

    def x(self, num_bytes: float) -> float:
        """Position of a size."""
        share = (log10(num_bytes) - self.first_size) / max(1e-9, self.last_size - self.first_size)
        return _WIDTH * share

    def y(self, rate: float) -> float:
        """Position of a bandwidth."""
        return _HEIGHT * (1 - (log10(rate) - self.lowest) / (self.highest - self.lowest))

    def axes(self) -> Iterator[str]:
        """Lines at powers of ten, with their numbers."""
        yield '<g stroke="#d3d9e0" class="grey end">'
        for power in range(self.lowest, self.highest + 1):
            y = self.y(10.0**power)
            yield f'<path d="M0 {y:.1f}H{_WIDTH}"/>'
            yield f'<text stroke="none" x="-8" y="{y + 4:.1f}">{_label(power)}/s</text>'
        yield '</g><g stroke="#d3d9e0" class="grey middle">'
        for power in range(ceil(self.first_size), floor(self.last_size) + 1):
            x = self.x(10.0**power)
            yield f'<path d="M{x:.1f} 0V{_HEIGHT}"/>'
            yield f'<text stroke="none" x="{x:.1f}" y="{_HEIGHT + 18}">{_label(power)}</text>'
        yield f'<text stroke="none" x="{_WIDTH / 2}" y="{_HEIGHT + 38}">size</text></g>'


def _scale(measured: Sequence[Measurement]) -> _Scale:
    sizes = [log10(m.num_bytes) for m in measured] or [0.0, 1.0]
    rates = [log10(bus_bandwidth(m)) for m in measured] or [0.0, 1.0]
    lowest = floor(min(rates))
    highest = max(lowest + 1, ceil(max(rates)))
    return _Scale(first_size=min(sizes), last_size=max(sizes), lowest=lowest, highest=highest)


def _curves(scale: _Scale, lines: dict[str, list[Measurement]]) -> Iterator[str]:
    """A line and a name for every operation; names that would overlap are moved apart."""
    ends = {}
    for operation, rows in lines.items():
        points = [
            (scale.x(m.num_bytes), scale.y(bus_bandwidth(m))) for m in sorted(rows, key=lambda m: m.num_bytes)
        ]
        ends[operation] = points[-1]
        color, dash = _look(operation)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield (
            f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points)
    for operation, y in _apart({name: y for name, (_, y) in ends.items()}).items():
        (x_end, y_end), (color, _) = ends[operation], _look(operation)
        yield f'<path d="M{x_end + 3:.1f} {y_end:.1f}L{_WIDTH + 16} {y:.1f}" stroke="{color}" opacity="0.5"/>'
        yield f'<text x="{_WIDTH + 20}" y="{y + 4:.1f}" style="fill:{color}">{operation}</text>'


def _look(operation: str) -> tuple[str, str]:
    """Colour and dashes of an operation."""
    number = OPERATIONS.index(operation)
    return _COLORS[number], _DASHES[number % len(_DASHES)]


def _apart(wanted: dict[str, float]) -> dict[str, float]:
    """Heights near the wanted ones, at least a line of text apart, inside the panel.

    >>> _apart({"a": 10.0, "b": 12.0, "c": 90.0})
    {'a': 10.0, 'b': 25.0, 'c': 90.0}
    """
    placed: dict[str, float] = {}
    lowest = float("-inf")
    for name, y in sorted(wanted.items(), key=lambda item: item[1]):
        lowest = placed[name] = max(y, lowest + _LINE_HEIGHT)
    limit = float(_HEIGHT)
    for name in reversed(placed):
        placed[name] = min(placed[name], limit)
        limit = placed[name] - _LINE_HEIGHT
    return placed


def _label(power: int) -> str:
    """A power of ten of bytes, without digits after the point.

    >>> _label(4), _label(9)
    ('10 KB', '1 GB')
    """
    number, unit = format_bytes(10.0**power).split()
    return f"{float(number):g} {unit}"
