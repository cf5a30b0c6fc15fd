"""The live line of a run: step, loss, tokens or samples per second, time to go.

It reads what the reporting ranks append to their records, so it costs the ranks nothing.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from launcher.app.output import takes_control
from launcher.base.files import json_object, read_json
from launcher.base.timestamps import stamped
from launcher.base.units import counted, format_count, format_duration
from launcher.contract.job import RESUME_NOTE
from launcher.contract.mesh import Coordinates
from launcher.contract.plan import Plan
from launcher.runs.store import RunDirectory
from launcher.runs.tail import Tail, last_lines

_WINDOW_STEPS = 20
"""Steps that the speed is averaged over."""
_PLAIN_INTERVAL_S = 5
"""Least time between two lines when the output is not a terminal."""
_LIVE_INTERVAL_S = 0.2


class RunTail:
    """What the ranks that stand for a run append; of several the furthest counts: others may be gone."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._tails = [Tail(path, from_end=True) for path in paths]
        self._num_starts = [0] * len(paths)
        """Seen of each rank."""
        self._newest_start = 0
        self._done = {"step": -1, "eval": -1}
        """By type of record, the last step that the furthest rank has recorded since the newest start."""

    def read(self) -> Iterator[dict[str, Any]]:
        """Every start, step and evaluation that no rank had recorded at the last call."""
        for index, tail in enumerate(self._tails):
            found = filter(None, map(json_object, tail.read().splitlines()))
            yield from (record for record in found if self._is_first(index, record))

    def _is_first(self, index: int, record: dict[str, Any]) -> bool:
        kind = record["type"]
        if kind == "header":
            self._num_starts[index] += 1
            if self._num_starts[index] <= self._newest_start:
                return False
            self._newest_start = self._num_starts[index]
            self._done = dict.fromkeys(self._done, -1)
            return True
        is_current = self._num_starts[index] == self._newest_start
        if kind not in self._done or not is_current or record["step"] <= self._done[kind]:
            return False
        self._done[kind] = record["step"]
        return True


@dataclass
class StepView:
    """What the latest steps say about the run."""

    num_steps: int
    unit: str
    """What ``num_tokens`` of the records counts."""
    num_done: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    first_step: int | None = None
    """Of the newest start; None before it."""
    num_skipped: int = 0
    """Steps without an update: the gradient overflowed, or an alarm had the batch skipped."""
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))
    """(tokens, nanoseconds) of the latest steps."""

    def take(self, record: dict[str, Any]) -> None:
        """Takes in what `RunTail` has read: a step, a start of the ranks, or an evaluation."""
        if record["type"] == "step":
            self.add(record)
        elif record["type"] == "header":
            self.begin()
        elif record["type"] == "eval":
            self.eval_loss = record["loss"]

    def add(self, record: dict[str, Any]) -> None:
        """Takes in one step."""
        if self.first_step is None:
            self.first_step = record["step"]
        self.num_done = record["step"] + 1
        self.loss = record["loss"]
        self.num_skipped += record.get("is_skipped", False)
        self.recent.append((record["num_tokens"], record["duration_ns"]))

    def begin(self) -> None:
        """Takes in that the ranks were started: what comes is slow at first, and may be known already."""
        self.first_step, self.num_skipped = None, 0
        self.recent.clear()

    @property
    def step_s(self) -> float:
        """Mean time of the latest steps; the first one starts slowly and counts only while alone."""
        times = [duration for _, duration in self.recent]
        is_start = self.num_done - (self.first_step or 0) == len(times) > 1
        times = times[1:] if is_start else times
        return sum(times) / len(times) / 1e9

    @property
    def per_second(self) -> float:
        """What a second of the latest steps takes in, in ``unit``."""
        return self.recent[-1][0] / self.step_s

    def __str__(self) -> str:
        width = len(str(self.num_steps))
        parts = [f"step {self.num_done:{width}}/{self.num_steps}"]
        parts += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        parts += [f"{format_count(round(self.per_second))} {self.unit}/s"]
        parts += [f"{self.num_skipped} skipped"] if self.num_skipped else []
        left = self.num_steps - self.num_done
        parts += [f"{format_duration(left * self.step_s)} to go"] if left else []
        return "   ".join(parts)


class Progress:
    """Shows a run on a stream: one line redrawn on a terminal, now and then a line elsewhere."""

    def __init__(
        self,
        records: Sequence[Path],
        num_steps: int,
        stream: TextIO,
        *,
        unit: str = "tokens",
        resumed: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``resumed``: where ranks say which checkpoint they resume from."""
        self._tail = RunTail(records)
        self.view = StepView(num_steps=num_steps, unit=unit)
        self._stream = stream
        self._clock = clock
        self._is_live = takes_control(stream)
        self._start = self._shown = clock()
        self._resumed, self._resumed_at = resumed, 0
        self._drawn = 0
        """Columns of the line that is on the terminal."""
        self._printed = ""

    def update(self) -> None:
        """Reads what is new and shows it when it is time."""
        self._tell_resumed()
        first_step = self.view.num_done == 0
        for record in self._tail.read():
            self.view.take(record)
            if record["type"] == "eval":
                steps = counted(record["step"], "step")
                self._print(f"evaluation after {steps}: loss {record['loss']:.4f}")
        first_step = first_step and self.view.num_done > 0
        if self._is_live:
            self._draw()
        elif self.view.recent and (first_step or self._is_due(_PLAIN_INTERVAL_S)):
            self._print(str(self.view))

    def close(self) -> None:
        """Leaves the last state on a line of its own."""
        self._erase()
        if self.view.recent and self._printed != str(self.view):
            self._print(str(self.view))

    def _tell_resumed(self) -> None:
        """Says once which checkpoint the ranks resumed from: they write it at every start."""
        if self._resumed is None or not self._resumed.exists():
            return
        written_at = self._resumed.stat().st_mtime_ns
        if written_at != self._resumed_at:
            self._resumed_at = written_at
            note = read_json(self._resumed)
            for sentence in note.get("skipped", ()):
                self._print(sentence)
            self._print(f"resumed after step {note.get('step')}")

    def _draw(self) -> None:
        if not self._is_due(_LIVE_INTERVAL_S):
            return
        waited_s = round(self._clock() - self._start)
        text = str(self.view) if self.view.recent else f"starting the ranks   {waited_s} s"
        columns = shutil.get_terminal_size().columns
        text = text[: max(columns - 1, 1)]
        self._stream.write(f"\r{text:{self._drawn}}")
        self._stream.flush()
        self._drawn = len(text)

    def _print(self, text: str) -> None:
        self._erase()
        self._stream.write((text if self._is_live else stamped(text)) + "\n")
        self._stream.flush()
        self._printed = text
        self._shown = self._clock()

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"\r{'':{self._drawn}}\r")
            self._drawn = 0

    def _is_due(self, interval_s: float) -> bool:
        now = self._clock()
        if now - self._shown < interval_s:
            return False
        self._shown = now
        return True


def progress_of(directory: RunDirectory, plan: Plan, stream: TextIO) -> Progress:
    """The live line of a run."""
    records, num_steps = reporting_records(directory, plan), plan.config.train.num_steps
    resumed = directory.path / RESUME_NOTE
    return Progress(records, num_steps, stream, unit=plan.batch.unit, resumed=resumed)


def reporting_records(directory: RunDirectory, plan: Plan) -> list[Path]:
    """The records that hold the loss and stand for the run: of one rank, or of all where any may be gone."""
    ranks = [plan.mesh.rank(Coordinates(pp=plan.stages[-1].pp_rank, dp=0, tp=0))]
    for role in plan.roles:
        if role.trains and role.is_expendable:
            ranks = list(range(role.first_rank, role.first_rank + role.num_ranks))
    return [directory.records(rank) for rank in ranks]


def last_step(directory: RunDirectory) -> str:
    """The steps that rank 0 has recorded, or the furthest of ranks of which any may be gone, out of those
    planned; empty before the first, and where the files are damaged."""
    with suppress(AttributeError, LookupError, TypeError, ValueError, OverflowError):
        return _last_step(directory, read_json(directory.plan))
    return ""


def _last_step(directory: RunDirectory, plan: dict[str, Any]) -> str:
    expendable = [role["num_ranks"] for role in plan.get("roles", ()) if role.get("is_expendable")]
    newest = [_newest_step(directory.records(rank)) for rank in range(max(expendable, default=1))]
    steps = [step for step in newest if step is not None]
    if not steps:
        return ""
    return f"{max(steps) + 1}/{plan.get('config', {}).get('train', {}).get('num_steps', '?')}"


def _newest_step(records: Path) -> int | None:
    """The step that a rank has recorded last; None before the first."""
    if not records.is_file():
        return None
    lines = map(json_object, last_lines(records))
    steps = {"step": "step", "segment": "newest_step"}
    found = [record[steps[kind]] for record in lines if record and (kind := record.get("type")) in steps]
    return int(found[-1]) if found else None
