"""The time of a step by kind: a clock that is always in exactly one section; and who measures, on what."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from launcher.base.machine import cpu_model, num_cores
from launcher.contract.plan import RankPlan
from launcher.contract.records import COLLECTIVE_KINDS, COMPUTE, OTHER, Header
from launcher.runtime.process.heartbeat import HeartbeatWriter


class Clock:
    """Attributes every nanosecond of a step to the innermost open section.

    On CPU a mark is a time of the host's monotonic clock. On CUDA it is an event recorded on the current
    stream, so that a section is the device's time between its marks; no mark synchronises, the events are
    read once at the end of the step.
    """

    def __init__(self, device: torch.device, heartbeat: HeartbeatWriter | None = None) -> None:
        self.heartbeat = heartbeat
        """Records every change of section, also of those that are not timed."""
        self._doing = OTHER
        self._cuda = device.type == "cuda"
        self._stack: list[str] = []
        self._marks: list[tuple[Any, str]] = []
        self._events: list[torch.cuda.Event] = []
        self._computes: list[int] = []
        self._first_backward: int | None = None
        self._start_ns = 0
        self._sealed = False

    def start(self) -> None:
        """Begins the first step. Sections before it are ignored."""
        self._stack, self._marks, self._computes, self._first_backward = [OTHER], [], [], None
        self._start_ns = time.perf_counter_ns()
        self.end_startup()
        self._mark()

    def may_write(self) -> None:
        """Ends the rank where its run directory is another's by now."""
        if self.heartbeat:
            self.heartbeat.may_write()

    def end_startup(self) -> None:
        """From now on the watchdog ends the rank when it does not beat."""
        if self.heartbeat:
            self.heartbeat.end_startup()

    def beat(self) -> None:
        """A heartbeat of a rank that waits."""
        self._report(self._doing)

    def section(self, kind: str, *, sealed: bool = False) -> _Section:
        """Attributes the time inside to ``kind``, without the time of inner sections.

        ``sealed``: inner sections count as ``kind`` too (an evaluation is of one kind).
        """
        return _Section(self, kind, sealed=sealed)

    def action(self, *, is_backward: bool = False) -> _Section:
        """A compute section that is also recorded by itself (one F or B); of the backwards, the start of the
        step's first."""
        if is_backward and self._first_backward is None:
            self._first_backward = len(self._computes)
        return _Section(self, COMPUTE, is_action=True)

    def _open(self, kind: str, *, sealed: bool) -> int | None:
        """Enters a section; returns its first mark, None outside a step or inside a sealed section."""
        if not self._stack or self._sealed:
            return None
        self._sealed = sealed
        self._stack.append(kind)
        self._mark()
        return len(self._marks) - 1

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Reports what the rank does inside, without timing it."""
        before = self._report(what)
        yield
        self._report(before)

    def begin_step(self, step: int) -> None:
        """Reports the rank's step."""
        if self.heartbeat:
            self.heartbeat.step = step
        self._report(OTHER)

    def _report(self, what: str) -> str:
        """Reports what the rank does from now on; returns what it did before."""
        before, self._doing = self._doing, what
        if self.heartbeat:
            self.heartbeat.beat(what)
        return before

    def _close(self, first: int, *, is_action: bool) -> None:
        self._sealed = False
        self._stack.pop()
        self._mark()
        if is_action:
            self._computes += [first, len(self._marks) - 1]

    def lap(self) -> dict[str, Any]:
        """Ends a step and begins the next at the same moment, so that no time is lost between them.

        Returns the time fields of the step's `StepRecord`.
        """
        self._mark()
        start_ns, now_ns = self._start_ns, time.perf_counter_ns()
        marks, computes, backward = self._marks, self._computes, self._first_backward
        times = self._times_ns(marks)
        self._start_ns = now_ns
        self._marks, self._computes, self._first_backward = marks[-1:], [], None
        if self._cuda:  # the last event begins the next step: it must not be recorded again
            self._events[0], self._events[len(marks) - 1] = self._events[len(marks) - 1], self._events[0]
        first_backward_ns = None if backward is None else times[computes[backward]] - times[0]
        fields = _fields(marks, times, computes)
        return {"start_ns": start_ns, "first_backward_ns": first_backward_ns, **fields}

    def _mark(self) -> None:
        if not self._cuda:
            self._marks.append((time.perf_counter_ns(), self._stack[-1]))
            return
        if len(self._events) <= len(self._marks):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[len(self._marks)]
        event.record()
        self._marks.append((event, self._stack[-1]))

    def _times_ns(self, marks: list[tuple[Any, str]]) -> list[int]:
        if not self._cuda:
            return [mark for mark, _ in marks]
        first = marks[0][0]
        marks[-1][0].synchronize()
        return [round(first.elapsed_time(mark) * 1e6) for mark, _ in marks]


def _fields(marks: list[tuple[Any, str]], times: list[int], computes: list[int]) -> dict[str, Any]:
    """The time fields of a step whose section after ``marks[i]`` is ``marks[i][1]``."""
    spans = [(kind, times[i + 1] - times[i]) for i, (_, kind) in enumerate(marks[:-1])]
    kinds: dict[str, int] = defaultdict(int)
    collectives: dict[str, list[int]] = defaultdict(list)
    for kind, elapsed in spans:
        kinds[kind] += elapsed
        if kind in COLLECTIVE_KINDS:
            collectives[kind].append(elapsed)
    actions = zip(computes[::2], computes[1::2], strict=True)
    return {
        "duration_ns": times[-1] - times[0],
        "kinds_ns": dict(kinds),
        "collectives_ns": dict(collectives),
        "compute_ns": [sum(t for kind, t in spans[first:last] if kind == COMPUTE) for first, last in actions],
    }


class _Section:
    """One section of a clock. A class, not a generator: a pipeline enters two for every action."""

    __slots__ = ("_before", "_clock", "_first", "_is_action", "_kind", "_sealed")

    def __init__(self, clock: Clock, kind: str, *, sealed: bool = False, is_action: bool = False) -> None:
        self._clock, self._kind, self._sealed, self._is_action = clock, kind, sealed, is_action

    def __enter__(self) -> None:
        self._before = self._clock._report(self._kind)
        self._first = self._clock._open(self._kind, sealed=self._sealed)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._first is not None:
            self._clock._close(self._first, is_action=self._is_action)
        if error is None:  # else the last report is where the rank failed
            self._clock._report(self._before)


def device_name(device: torch.device) -> str:
    """The product name of the device, from the driver or the operating system."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model()


def rank_header(plan: RankPlan, device: torch.device, p2p_latency_ns: int = 0) -> Header:
    """The first record of a rank: its coordinates (0 for a rank that does not train), device and host."""
    coordinates = plan.coordinates
    return Header(
        rank=plan.rank,
        role=plan.role.name,
        pp_rank=coordinates.pp if coordinates else 0,
        dp_rank=coordinates.dp if coordinates else 0,
        tp_rank=coordinates.tp if coordinates else 0,
        device=device_name(device),
        p2p_latency_ns=p2p_latency_ns,
        hostname=socket.gethostname(),
        num_threads=torch.get_num_threads(),
        num_cores=num_cores(),
        torch_version=torch.__version__,
    )
