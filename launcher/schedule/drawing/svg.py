"""Draws a timeline as a stand-alone SVG picture: a row per rank, boxes to scale.

The colours (blue, orange, green) differ in lightness as well as in hue, so that they are distinct with
any colour vision and in print.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import floor, log10

from launcher.base.units import counted, format_duration
from launcher.contract.actions import B, F, PipelineShape, W
from launcher.schedule.drawing.grid import label, phases
from launcher.schedule.simulate import Timeline

COLORS = {F: (24, 90, 157), B: (245, 171, 70), W: (70, 160, 130)}
"""Red, green and blue of the actions of a rank's first chunk; those of later chunks are lighter."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 32, 92, 56
_PITCH, _BOX, _STRIP = 34, 22, 3
"""Heights: from row to row, of a box, of the strip below it that shows the phases."""
_MIN_WIDTH, _MAX_WIDTH = 860, 3000
_DIGIT, _LETTER = 6.8, 6.4
"""Widths of a character in a box and in the legend."""
_STEADY, _RAMP, _IDLE = "#46505e", "#bcc4ce", "#eceff2"
_STYLE = (
    "text{font:12px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:#1c2530}"
    "text.title{font-size:17px;font-weight:600}.grey text,text.grey{fill:#5a6572}"
    ".middle text{text-anchor:middle}.labels text{font-size:11px}.light text{fill:#fff}"
)


def svg_text(timeline: Timeline, shape: PipelineShape, *, title: str) -> str:
    """The picture of a timeline under a title.

    >>> from launcher.contract.actions import from_text
    >>> from launcher.schedule.simulate import simulate, textbook_costs
    >>> shape = PipelineShape(num_pp_ranks=1)
    >>> costs = textbook_costs(shape, splits_backward=False)
    >>> picture = svg_text(simulate([from_text("0F0 0B0")], shape, costs), shape, title="a < b")
    >>> picture.splitlines()[2]
    '<text class="title" x="84" y="30">a &lt; b</text>'
    """
    chart = _Chart(timeline=timeline, shape=shape, width=_width(timeline, shape))
    width, height = _LEFT + chart.width + _RIGHT, chart.bottom + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>{_STYLE}</style>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="{_LEFT}" y="30">{escape(title)}</text>',
        f'<text class="grey" x="{_LEFT}" y="50">{chart.summary()}</text>',
        *chart.rows(),
        *chart.axis(),
        *chart.boxes(),
        *chart.labels(),
        *_legend(chart),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, kw_only=True)
class _Chart:
    """The parts of a picture; lengths in pixels."""

    timeline: Timeline
    shape: PipelineShape
    width: int
    """Of the whole step."""

    @property
    def bottom(self) -> int:
        """Lower end of the last row."""
        return _TOP + _PITCH * self.shape.num_pp_ranks

    def x(self, seconds: float) -> float:
        """Position of a time."""
        return _LEFT + self.width * seconds / self.timeline.makespan_s

    def color(self, kind: str, chunk: int) -> str:
        """Colour of an action; lighter for later chunks."""
        share = 0.65 * chunk / self.shape.num_chunks
        return f"rgb({','.join(str(round(part + (255 - part) * share)) for part in COLORS[kind])})"

    def summary(self) -> str:
        """Sizes and results in a line."""
        ranks = counted(self.shape.num_pp_ranks, "pipeline rank")
        chunks = f" of {self.shape.num_chunks} chunks" if self.shape.num_chunks > 1 else ""
        microbatches = counted(self.shape.num_microbatches, "microbatch")
        length, idle = format_duration(self.timeline.makespan_s), self.timeline.bubble_fraction
        return f"{ranks}{chunks}, {microbatches} · {length} · {idle:.1%} idle"

    def rows(self) -> Iterator[str]:
        """The ranks: their names, their idle background, and a strip for each phase."""
        yield f'<text class="grey" x="{_LEFT - 72}" y="{_TOP - 12}">pp_rank</text>'
        yield '<g class="middle">'
        for rank, spans in enumerate(self.timeline.spans):
            top = _TOP + _PITCH * rank
            yield f'<text x="{_LEFT - 48}" y="{top + _BOX - 6}">{rank}</text>'
            yield f'<rect x="{_LEFT}" y="{top}" width="{self.width}" height="{_BOX}" fill="{_IDLE}"/>'
            num_warmup, num_steady, _ = phases([action for action, _, _ in spans])
            ends = (0, num_warmup, num_warmup + num_steady, len(spans))
            for first, end, color in zip(ends, ends[1:], (_RAMP, _STEADY, _RAMP), strict=False):
                if first < end:
                    left, right = self.x(spans[first][1]), self.x(spans[end - 1][2])
                    yield _rect((left, top + _BOX + 2), (right - left, _STRIP), color)
        yield "</g>"

    def axis(self) -> Iterator[str]:
        """A line and a number at round times."""
        scale, unit = next((s, u) for s, u in _UNITS if self.timeline.makespan_s >= s or u == "us")
        step = _round_step(self.timeline.makespan_s / scale / (self.width / 90))
        yield '<g class="grey middle" stroke="#d3d9e0" stroke-width="1">'
        for number in range(floor(self.timeline.makespan_s / scale / step) + 1):
            x = _number(self.x(number * step * scale))
            yield f'<path d="M{x} {_TOP - 6}V{self.bottom - _PITCH + _BOX}"/>'
            yield f'<text stroke="none" x="{x}" y="{_TOP - 12}">{number * step:g} {unit}</text>'
        yield "</g>"

    def boxes(self) -> Iterator[str]:
        """The actions, all of one colour in one path: a large schedule has hundreds of thousands."""
        shapes: dict[tuple[str, int], list[str]] = defaultdict(list)
        narrowest = float(self.width)
        for rank, spans in enumerate(self.timeline.spans):
            top = _TOP + _PITCH * rank
            for action, start, end in spans:
                left, right = self.x(start), self.x(end)
                if right > left:
                    narrowest = min(narrowest, right - left)
                    box = f"M{_number(left)} {top}H{_number(right)}v{_BOX}H{_number(left)}z"
                    shapes[action.kind, self.shape.chunk(action.stage)].append(box)
        edge = _number(min(1.0, 0.15 * narrowest))
        for (kind, chunk), paths in sorted(shapes.items()):
            fill = self.color(kind, chunk)
            yield f'<path fill="{fill}" stroke="#fff" stroke-width="{edge}" d="{"".join(paths)}"/>'

    def labels(self) -> Iterator[str]:
        """The microbatch of every action with room for it, light on dark boxes."""
        texts: dict[bool, list[str]] = {True: [], False: []}
        for rank, spans in enumerate(self.timeline.spans):
            y = _TOP + _PITCH * rank + _BOX - 7
            for action, start, end in spans:
                text, left, right = label(action, self.shape), self.x(start), self.x(end)
                if len(text) * _DIGIT + 2 <= right - left:
                    is_dark = action.kind == F and self.shape.chunk(action.stage) * 2 < self.shape.num_chunks
                    x = _number((left + right) / 2)
                    texts[is_dark].append(f'<text x="{x}" y="{y}">{text}</text>')
        for is_dark, group in texts.items():
            yield f'<g class="middle labels{" light" if is_dark else ""}">{"".join(group)}</g>'


def _width(timeline: Timeline, shape: PipelineShape) -> int:
    """The width at which the shortest action has room for its label, within bounds."""
    shortest = min(end - start for spans in timeline.spans for _, start, end in spans if end > start)
    num_characters = len(str(shape.num_microbatches - 1)) + (shape.num_chunks > 1)
    wanted = timeline.makespan_s / shortest * (num_characters * _DIGIT + 5)
    return round(min(max(wanted, _MIN_WIDTH), _MAX_WIDTH))


def _legend(chart: _Chart) -> Iterator[str]:
    """What the colours mean, from left to right."""
    kinds = {action.kind for spans in chart.timeline.spans for action, _, _ in spans}
    backward = "input gradient" if W in kinds else "backward"
    chunks = range(chart.shape.num_chunks)
    letters = f", chunks a to {chr(ord('a') + min(len(chunks) - 1, 25))}" if len(chunks) > 1 else ""
    names = ((F, f"forward{letters}"), (B, backward), (W, "weight gradients"))
    entries = [
        ([chart.color(kind, chunk) for chunk in chunks], 12, name) for kind, name in names if kind in kinds
    ]
    entries += [([_IDLE], 12, "idle"), ([_RAMP], _STRIP, "warm-up, cool-down")]
    entries += [([_STEADY], _STRIP, "steady phase")]
    x, y = float(_LEFT), chart.bottom + 24
    for colors, height, name in entries:
        for color in colors:
            yield _rect((x, y - height / 2), (14, height), color)
            x += 15
        yield f'<text x="{_number(x + 5)}" y="{y + 4}">{name}</text>'
        x += 5 + len(name) * _LETTER + 20


_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20 ...

    >>> _round_step(0.3), _round_step(12), _round_step(50)
    (0.5, 20.0, 50.0)
    """
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _rect(at: tuple[float, float], size: tuple[float, float], color: str) -> str:
    (x, y), (width, height) = at, size
    return (
        f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}" '
        f'fill="{color}"/>'
    )


def _number(pixels: float) -> str:
    """Two decimals at most, as short as they can be.

    >>> _number(3.0), _number(2.504)
    ('3', '2.5')
    """
    return f"{pixels:.2f}".rstrip("0").rstrip(".")
