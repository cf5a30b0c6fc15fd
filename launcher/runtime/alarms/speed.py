"""Alarms of the speed: a slow step, a rank slower than the others for long, and no step at all.

One rank, which writes the events, looks at the times of its own steps. The ranks exchange how long each of
them has computed once in ``alarms.slow_rank_window`` steps, in one message of a number.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.base.errors import JobError
from launcher.base.files import write_whole
from launcher.base.units import format_duration
from launcher.contract.alarms.events import Event, now
from launcher.contract.heartbeat import PEERS
from launcher.contract.job import error_name
from launcher.contract.mesh import Mesh
from launcher.contract.records import COMPUTE, SINGLE_RANK
from launcher.runtime.api import RankContext
from launcher.runtime.process.log import log

LEAST_SLOW_S = 1.0
"""No step that takes less is slow: shorter pauses are the operating system's."""
_NAME_BYTES = 64
"""Room for a host name, whose length Linux limits to 64."""


def slow_ranks(compute_s: Sequence[float], stage_of: Sequence[int], factor: float) -> dict[int, float]:
    """The ranks that compute for longer than the median of the others of their stage times ``factor``, each
    with that median. A rank without others is compared with nobody.

    >>> slow_ranks([1.0, 1.0, 3.0, 9.0], [0, 0, 0, 1], 1.5)
    {2: 1.0}
    """
    found = {}
    for rank, (own, stage) in enumerate(zip(compute_s, stage_of, strict=True)):
        peers = [s for other, s in enumerate(compute_s) if other != rank and stage_of[other] == stage]
        if peers and own > factor * (middle := median(peers)):
            found[rank] = middle
    return found


class SpeedAlarms:
    """Watches the times of one rank's steps, and with the other ranks how long each of them computes."""

    def __init__(self, ctx: RankContext, write: Callable[[Event], None], *, is_first: bool) -> None:
        """``is_first``: whether this is the rank that writes the events."""
        self._ctx, self._write, self._is_first = ctx, write, is_first
        settings = self._settings = ctx.config.alarms
        self._durations: deque[float] = deque(maxlen=settings.slow_step_window)
        self._step_factor = settings.slow_step_factor
        self._rank_factor, self._rank_window = settings.slow_rank_factor, settings.slow_rank_window
        self._was_slow = False
        has_peers = ctx.replicas is None and ctx.plan.plan.world_size > 1
        self._compares = settings.slow_rank != "ignore" and has_peers
        self._compute_ns = self._num_steps = 0
        self._nodes: list[str] = []
        self._told: set[int] = set()
        """Ranks that are known to be slow."""

    def after(self, step: int, times: Mapping[str, Any]) -> None:
        """Takes in the times of a step. Collective over all ranks once in a window of steps.

        Raises:
            JobError: where the run is set to fail.
        """
        kinds = times["kinds_ns"]
        if self._is_first and self._settings.slow_step != "ignore":
            self._look_at_step(step, (times["duration_ns"] - kinds.get(SINGLE_RANK, 0)) / 1e9)
        if self._compares:
            self._compute_ns += kinds.get(COMPUTE, 0)
            self._num_steps += 1
            if self._num_steps == self._rank_window:
                self._look_at_ranks(step)
                self._compute_ns = self._num_steps = 0

    def _look_at_step(self, step: int, duration_s: float) -> None:
        known, is_slow = self._durations, False
        if len(known) == known.maxlen and duration_s >= LEAST_SLOW_S:
            usual_s = median(known)
            is_slow = duration_s > self._step_factor * usual_s
            if is_slow and not self._was_slow:  # of several in a row the first
                figures = {"seconds": duration_s, "median": usual_s}
                text = (
                    f"step {step + 1} took {format_duration(duration_s)}, and the median of the last "
                    f"{len(known)} is {format_duration(usual_s)} (alarms.slow_step)"
                )
                event = Event(time=now(), kind="slow_step", step=step + 1, figures=figures)
                self._tell(event, self._settings.slow_step, text)
        self._was_slow = is_slow
        known.append(duration_s)

    def _look_at_ranks(self, step: int) -> None:
        mine = torch.tensor([self._compute_ns / 1e9], dtype=torch.float64, device=self._ctx.common_device)
        with self._ctx.clock.doing(PEERS):
            if not self._nodes:
                self._nodes = [_text(name) for name in _gathered(_name().to(mine.device))]
            compute_s = [float(each) for each in _gathered(mine)]
        if not self._is_first:
            return
        stage_of = _stage_of(self._ctx.plan.plan.mesh)
        slow = slow_ranks(compute_s, stage_of, self._rank_factor)
        new, self._told = sorted(slow.keys() - self._told), set(slow)
        for rank in new:
            figures = {"seconds": compute_s[rank], "median": slow[rank]}
            text = (
                f"rank {rank} on {self._nodes[rank]} computed for {format_duration(compute_s[rank])} in the "
                f"{self._num_steps} steps up to {step + 1}, the other ranks of its stage for "
                f"{format_duration(slow[rank])} (alarms.slow_rank)"
            )
            event = Event(
                time=now(),
                kind="slow_rank",
                step=step + 1,
                rank=rank,
                node=self._nodes[rank],
                figures=figures,
            )
            self._tell(event, self._settings.slow_rank, text)

    def _tell(self, event: Event, action: str, text: str) -> None:
        tell(self._write, event, action)
        if action == "end":
            raise JobError(text)


def tell(write: Callable[[Event], None], event: Event, action: str) -> None:
    """Writes an event with what is done about it."""
    write(replace(event, done="the run fails" if action == "end" else "the training goes on"))


class ProgressWatch:
    """A thread that notices when no step is done for long, though the watchdog of the rank sees it alive."""

    def __init__(self, ctx: RankContext, run_dir: Path, write: Callable[[Event], None]) -> None:
        """Begins to watch."""
        settings = ctx.config.alarms
        self._rank, self._run_dir, self._write = ctx.plan.rank, run_dir, write
        self._action = settings.no_progress
        self._limit_s = settings.no_progress_s or ctx.config.run.timeout_s / 2
        self._since, self._step, self._told = time.monotonic(), 0, False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="no-progress", daemon=True)
        self._thread.start()

    def done(self, num_done: int) -> None:
        """Notes that a step is done."""
        self._since, self._step, self._told = time.monotonic(), num_done, False

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._limit_s / 4)):
            waited_s = time.monotonic() - self._since
            if waited_s > self._limit_s and not self._told:
                self._told = True
                event = Event(
                    time=now(), kind="no_progress", step=self._step + 1, figures={"seconds": waited_s}
                )
                tell(self._write, event, self._action)
                if self._action == "end":
                    self._end(waited_s)

    def _end(self, waited_s: float) -> None:
        """Ends the process: the training may be anywhere, also where no exception reaches it."""
        text = (
            f"no step was done for {format_duration(waited_s)} after step {self._step} (alarms.no_progress)"
        )
        record = {
            "rank": self._rank,
            "time": time.time(),
            "error_type": JobError.__name__,
            "message": text,
            "traceback": "",
        }
        write_whole(self._run_dir / error_name(self._rank), json.dumps(record, indent=1))
        log(text)
        os._exit(1)


def _stage_of(mesh: Mesh) -> list[int]:
    return [mesh.coordinates(rank).pp for rank in range(mesh.num_ranks)]


def _gathered(mine: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [part.cpu() for part in parts]


def _name() -> Tensor:
    """This host's name as numbers, so that no object of another process is unpickled."""
    text = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _text(name: Tensor) -> str:
    return bytes(name.tolist()).rstrip(b"\0").decode(errors="replace")
