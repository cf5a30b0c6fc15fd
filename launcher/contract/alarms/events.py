"""What happened in a run, one JSON object a line in ``events.jsonl``: starts, alarms, ends.

It is only appended to and survives every start. One process writes at a time: the launcher or the job's
first node before and after the ranks, and meanwhile one rank, the first of the last pipeline stage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from launcher.base.files import json_object, read_regular
from launcher.typed.read import Reading, plain, read

EVENTS: Final = "events.jsonl"
"""The file, in the run directory."""
ALARMS: Final = ("spike", "not_finite", "slow_step", "slow_rank", "no_progress")
"""Kinds of events that are alarms: the names of their settings."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened."""

    time: str
    """Wall-clock time of the process that wrote it, ISO 8601 with the offset from UTC."""
    kind: str
    """One of `ALARMS`, or ``start``, ``restart``, ``requeue``, ``succeeded``, ``failed``, ``cancelled``,
    ``stopped``, ``unfit_node``."""
    step: int | None = None
    """The step, counted from 1 as in the log."""
    rank: int | None = None
    """The rank that it is about."""
    node: str = ""
    """That rank's host, or the one that it is about."""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    """What was measured, and what it was compared with; None: not a number."""
    done: str = ""
    """What was done about it, as a sentence."""

    def __str__(self) -> str:
        where = [f"step {self.step}"] if self.step is not None else []
        where += [f"rank {self.rank}" + (f" on {self.node}" if self.node else "")] * (self.rank is not None)
        figures = [
            f"{name} {'not a number' if value is None else f'{value:.4g}'}"
            for name, value in self.figures.items()
        ]
        words = [self.kind.replace("_", " "), *where, *figures]
        return f"{self.time}  {', '.join(words)}" + (f": {self.done}" if self.done else "")


def now() -> str:
    """The present time as events write it."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def append(run_dir: Path, event: Event) -> None:
    """Appends an event, whole lines at a time: half a line of a writer that was killed is ended first."""
    line = json.dumps(plain(event), separators=(",", ":"), allow_nan=False) + "\n"
    file = os.open(run_dir / EVENTS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = "\n" + line
        os.write(file, line.encode())
    finally:
        os.close(file)


def events_of(text: bytes) -> list[Event]:
    """The events in whole lines; what is damaged or half written is left out."""
    found = (json_object(line) for line in text.split(b"\n"))
    read_ones = (read(Event, values, Reading()) for values in found if values is not None)
    return [event for event in read_ones if event is not None]


def read_events(run_dir: Path) -> list[Event]:
    """All events of a run, in the order in which they happened."""
    with suppress(OSError):
        return events_of(read_regular(run_dir / EVENTS))
    return []


def count_alarms(events: Sequence[Event]) -> dict[str, int]:
    """How often each alarm was raised, by kind; those that never were are left out."""
    counts = {kind: sum(event.kind == kind for event in events) for kind in ALARMS}
    return {kind: number for kind, number in counts.items() if number}
