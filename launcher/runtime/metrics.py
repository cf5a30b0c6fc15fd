"""Where the time of a step goes: a clock that is always in exactly one section, and its record."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from launcher.metrics.records import COLLECTIVE_KINDS, COMPUTE, OTHER, EvalRecord, Header, StepRecord
from launcher.typed import plain


class Clock:
    """Attributes every nanosecond of a step to the innermost open section.

    On CPU a mark is the host's monotonic clock. On CUDA it is an event recorded on the current
    stream, so that a section is what the device did between its marks; no mark synchronises, the
    events are read once at the end of the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stack: list[str] = []
        self._marks: list[tuple[Any, str]] = []
        self._events: list[torch.cuda.Event] = []
        self._computes: list[int] = []
        self._start_ns = 0

    def start(self) -> None:
        """Begins a step."""
        self._stack, self._marks, self._computes = [OTHER], [], []
        self._start_ns = time.perf_counter_ns()
        self._mark()

    @contextmanager
    def section(self, kind: str) -> Iterator[None]:
        """Attributes the time inside to ``kind``, less what inner sections take."""
        if not self._stack:  # outside a step
            yield
            return
        self._stack.append(kind)
        self._mark()
        try:
            yield
        finally:
            self._stack.pop()
            self._mark()

    @contextmanager
    def action(self) -> Iterator[None]:
        """A compute section that is also kept by itself (one F or B)."""
        first = len(self._marks)
        with self.section(COMPUTE):
            yield
        if self._stack:
            self._computes += [first, len(self._marks) - 1]

    def stop(self) -> dict[str, Any]:
        """Ends the step; returns the time fields of its `StepRecord`."""
        self._mark()
        times = self._times_ns()
        kinds: dict[str, int] = defaultdict(int)
        collectives: dict[str, list[int]] = {kind: [] for kind in COLLECTIVE_KINDS}
        for place in range(len(times) - 1):
            kind = self._marks[place][1]
            elapsed = times[place + 1] - times[place]
            kinds[kind] += elapsed
            if kind in collectives:
                collectives[kind].append(elapsed)
        computes = []
        for first, last in zip(self._computes[::2], self._computes[1::2], strict=True):
            spans = range(first, last)
            computes.append(sum(times[s + 1] - times[s] for s in spans if self._marks[s][1] == COMPUTE))
        self._stack = []
        return {
            "start_ns": self._start_ns,
            "duration_ns": times[-1] - times[0],
            "kinds_ns": dict(kinds),
            "collectives_ns": {kind: calls for kind, calls in collectives.items() if calls},
            "compute_ns": computes,
        }

    def _mark(self) -> None:
        if not self._cuda:
            self._marks.append((time.perf_counter_ns(), self._stack[-1]))
            return
        if len(self._events) <= len(self._marks):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[len(self._marks)]
        event.record()
        self._marks.append((event, self._stack[-1]))

    def _times_ns(self) -> list[int]:
        marks = [mark for mark, _ in self._marks]
        if not self._cuda:
            return marks
        marks[-1].synchronize()
        return [round(marks[0].elapsed_time(mark) * 1e6) for mark in marks]


class RecordWriter:
    """Appends records to this rank's file, one whole line at a time."""

    def __init__(self, folder: Path, header: Header) -> None:
        path = folder / f"rank-{header.rank:05d}.jsonl"
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self.write(header)

    def write(self, record: Header | StepRecord | EvalRecord) -> None:
        """Appends one record."""
        self._file.write(json.dumps(plain(record), separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def device_name(device: torch.device) -> str:
    """The product name of the device, by the driver or by the operating system."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def host_facts() -> dict[str, Any]:
    """The header fields that describe the host."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "hostname": socket.gethostname(),
        "num_threads": torch.get_num_threads(),
        "num_cores": affinity,
        "torch_version": torch.__version__,
    }
