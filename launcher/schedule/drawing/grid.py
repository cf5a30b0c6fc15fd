"""Draws a schedule in the terminal: a row per rank, a column per time slot.

A forward takes one slot and a backward two, or one for each half where it is split, as in textbooks,
whatever the stages cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

from launcher.contract.actions import Action, B, F, PipelineShape, W, has_weight_actions
from launcher.schedule.dependencies import ActionLists
from launcher.schedule.simulate import simulate, textbook_costs

MAX_ROWS = 16
"""Ranks drawn; of more, the first and the last of them."""
MIN_SLOTS = 8
"""Time slots drawn however narrow the terminal is."""

_MARGIN = "pp_rank  "
_COLORS = {F: (25, 31, 61, 67), B: (22, 29, 58, 65), W: (94, 95, 96, 130)}
"""256-colour backgrounds of each kind, by chunk."""


def draw(lists: ActionLists, shape: PipelineShape, *, width: int, color: bool) -> str:
    """The schedule as text, cut in the middle to ``width`` columns, with a legend below.

    >>> from launcher.contract.actions import from_text
    >>> lists = [from_text("0F0 0F1 0B0 0B1"), from_text("1F0 1B0 1F1 1B1")]
    >>> print(draw(lists, PipelineShape(num_pp_ranks=2, num_microbatches=2), width=80, color=False))
    pp_rank  0
          0  0|1 · · 0━━ ·|1━━
          1  · 0 0━━ 1 1━━ · ·
    1 forward, 1━━ backward of microbatch 1 · idle | after warm-up, before cool-down
    """
    pen = _Pen(shape=shape, is_split=has_weight_actions(lists), color=color)
    ranks = _kept(shape.num_pp_ranks, MAX_ROWS)
    rows = _rows(lists, pen, [rank for rank in ranks if rank is not None])
    num_slots = len(next(iter(rows.values())))
    slots = _kept(num_slots, max(MIN_SLOTS, (width - len(_MARGIN)) // (pen.width + 1)))
    lines = [_ruler(slots, pen.width + 1)]
    for rank in ranks:
        if rank is None:
            lines.append("⋮".rjust(len(_MARGIN) - 2))
        else:
            shown = (pen.plain("…") if slot is None else rows[rank][slot] for slot in slots)
            lines.append(f"{rank:>{len(_MARGIN) - 2}}  " + "".join(slot.draw() for slot in shown))
    lines.append(pen.legend())
    lines += _left_out(ranks, shape.num_pp_ranks, "pp_ranks") + _left_out(slots, num_slots, "slots")
    return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """One time slot of one rank."""

    text: str
    gap: str = " "
    """The column between it and the next slot."""
    goes_on: bool = False
    """Whether the next slot belongs to the same action."""
    color: int | None = None

    def draw(self) -> str:
        if self.color is None:
            return self.text + self.gap
        inside, outside = (self.gap, "") if self.goes_on else ("", self.gap)
        return f"\x1b[97;48;5;{self.color}m{self.text}{inside}\x1b[0m{outside}"


@dataclass(frozen=True, kw_only=True)
class _Pen:
    """Draws the actions of one shape."""

    shape: PipelineShape
    is_split: bool
    """Whether there are separate weight-gradient actions."""
    color: bool

    @property
    def width(self) -> int:
        """Columns of a slot's text: the microbatch, its chunk, and a mark for W."""
        return len(str(self.shape.num_microbatches - 1)) + (self.shape.num_chunks > 1) + self.is_split

    def plain(self, text: str) -> _Slot:
        """A slot without an action."""
        return _Slot(text=text.ljust(self.width))

    def action(self, action: Action, num_slots: int) -> list[_Slot]:
        """An action's slots: its label in the first, a bar through the others."""
        text = label(action, self.shape) + "w" * (action.kind == W)
        fill = "━" if action.kind == B and not self.color else " "
        text = text.ljust((self.width + 1) * num_slots - 1, fill) + " "
        colors = _COLORS[action.kind]
        return [
            _Slot(
                text=text[start : start + self.width],
                gap=text[start + self.width],
                goes_on=start + self.width + 1 < len(text),
                color=colors[self.shape.chunk(action.stage) % len(colors)] if self.color else None,
            )
            for start in range(0, len(text), self.width + 1)
        ]

    def legend(self) -> str:
        """The meaning of the symbols."""
        last = self.shape.num_microbatches - 1
        halves = ((F, 1, "forward"), (B, 1, "input gradient"), (W, 1, "weight gradients"))
        samples = halves if self.is_split else ((F, 1, "forward"), (B, 2, "backward"))
        names = [
            "".join(slot.draw() for slot in self.action(Action(0, kind, last), num_slots)).rstrip()
            + f" {name}"
            for kind, num_slots, name in samples
        ]
        is_chunked = self.shape.num_chunks > 1
        chunks = f" in chunk a (of a-{_letter(self.shape.num_chunks - 1)})" if is_chunked else ""
        return f"{', '.join(names)} of microbatch {last}{chunks} · idle | after warm-up, before cool-down"


def label(action: Action, shape: PipelineShape) -> str:
    """Microbatch and, where there are several, the chunk as a letter."""
    return f"{action.microbatch}{_letter(shape.chunk(action.stage)) if shape.num_chunks > 1 else ''}"


def _letter(chunk: int) -> str:
    return ascii_lowercase[chunk % len(ascii_lowercase)]


def _rows(lists: ActionLists, pen: _Pen, ranks: list[int]) -> dict[int, list[_Slot]]:
    """The time slots of some ranks, the same number for each."""
    shape = pen.shape
    timeline = simulate(lists, shape, textbook_costs(shape, splits_backward=pen.is_split))
    rows = {}
    for rank in ranks:
        row = [pen.plain("·")] * round(timeline.makespan_s)
        spans = [(action, round(start), round(end)) for action, start, end in timeline.spans[rank]]
        for action, start, end in spans:
            row[start:end] = pen.action(action, end - start)
        num_warmup, num_steady, num_cooldown = phases([action for action, _, _ in spans])
        bars = [spans[num_warmup - 1][2]] if num_warmup else []
        bars += [spans[num_warmup + num_steady][1]] if num_cooldown else []
        for slot in bars:
            row[slot - 1] = replace(row[slot - 1], gap="|")
        rows[rank] = row
    return rows


def _ruler(slots: list[int | None], cell: int) -> str:
    """The number of every tenth slot, where there is room."""
    line = _MARGIN
    for column, slot in enumerate(slots):
        start = len(_MARGIN) + column * cell
        if slot is not None and slot % 10 == 0 and len(line) <= start:
            line = line.ljust(start) + f"{slot} "
    return line


def _kept(total: int, at_most: int) -> list[int | None]:
    """The rows or columns that are drawn of ``total``; None: those left out in the middle.

    >>> _kept(5, 5), _kept(9, 5)
    ([0, 1, 2, 3, 4], [0, 1, None, 7, 8])
    """
    if total <= at_most:
        return list(range(total))
    tail = (at_most - 1) // 2
    return [*range(at_most - 1 - tail), None, *range(total - tail, total)]


def _left_out(kept: list[int | None], total: int, name: str) -> list[str]:
    return [f"left out: {total - len(kept) + 1} of {total} {name}"] if None in kept else []


def phases(actions: Sequence[Action]) -> tuple[int, int, int]:
    """Compute actions of one rank in warm-up, steady phase and cool-down.

    Warm-up: the forwards before the first forward-backward pair. Cool-down: what comes after the
    last such pair and, where the schedule splits the backward, the W that follows it.

    >>> from launcher.contract.actions import from_text
    >>> phases(from_text("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"))
    (2, 4, 2)
    >>> phases(from_text("1F0 1F1 1B0 1F2 1B1 1W0 1B2 1W1 1W2"))
    (1, 5, 3)
    """
    kinds = [kind for _, kind, _ in actions]
    if F not in kinds or B not in kinds:
        return 0, len(kinds), 0
    num_warmup = max(0, kinds.index(B) - 1)
    after_last_forward = kinds[len(kinds) - kinds[::-1].index(F) :]
    num_paired = 2 if after_last_forward[1:2] == [W] else 1
    num_cooldown = max(0, len(after_last_forward) - num_paired)
    return num_warmup, len(kinds) - num_warmup - num_cooldown, num_cooldown
