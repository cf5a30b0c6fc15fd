"""Which rank of a job hung, by the heartbeats of its ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.base.files import read_regular
from launcher.base.units import format_duration
from launcher.contract.heartbeat import (
    SERVING,
    SIZE,
    STOPPED_S,
    Heartbeat,
    heartbeat_name,
    stacks_name,
    unpack,
)
from launcher.contract.job import EXIT, JobState, of_start

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_MAX_FRAMES = 20
_SERVER_SILENT_S = 2.0
"""Far longer than the interval between two heartbeats of a server that waits."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A rank that hung."""

    rank: int
    heartbeat: Heartbeat
    """Its last heartbeat."""
    silent_s: float
    """Seconds from its last heartbeat until a watchdog ended the job."""
    stack: str
    """The stack of its main thread, innermost call first; empty where it was killed without writing one."""
    waiting: tuple[int, ...]
    """The ranks that were waiting for others."""
    stopped_s: float = 0.0
    """Seconds for which its process did not run; 0: it did."""

    def __str__(self) -> str:
        if self.stopped_s:
            return (
                f"hung {self.heartbeat}: its Python did not run for {format_duration(self.stopped_s)}, as "
                "when a process is stopped, its node stands still, or C code keeps the GIL (run.timeout_s)"
            )
        silent = format_duration(self.silent_s)
        if self.heartbeat.is_starting:
            return f"hung {self.heartbeat}: no step within run.start_timeout_s, not heard from for {silent}"
        return f"hung {self.heartbeat}: not heard from for {silent} (run.timeout_s)"


def find_hang(run_dir: Path, start: str = EXIT) -> Hang | None:
    """The rank that hung, where a watchdog ended a start of a run, by what it left in its folder; else None.

    It is one that did not run any more, whatever it did last; else, of the ranks that did not wait for
    another, the one with the oldest heartbeat.
    """
    beats = dict(heartbeats(run_dir, start))
    fired = {
        rank: when for rank in beats if (when := _watchdog_time(_stacks(run_dir, rank, start), beats[rank]))
    }
    if not fired:
        return None
    ended = min(fired.values())
    stopped = _stopped(beats, ended, ended - min(beats[rank].time for rank in fired))
    suspects = list(stopped) or [rank for rank in beats if _is_suspect(beats[rank], ended)] or list(beats)
    hung = min(suspects, key=lambda rank: (beats[rank].time, rank))
    return Hang(
        rank=hung,
        heartbeat=beats[hung],
        silent_s=max(0.0, ended - beats[hung].time),
        stack=_main_stack(_stacks(run_dir, hung, start)),
        waiting=tuple(sorted(rank for rank, beat in beats.items() if beat.is_waiting and rank != hung)),
        stopped_s=stopped.get(hung, 0.0),
    )


def _stopped(beats: Mapping[int, Heartbeat], ended: float, silent_s: float) -> dict[int, float]:
    """The rank whose process did not run for the longest time before the first watchdog ended a rank, which
    was silent for ``silent_s``, and for how long, if any: one that is stopped, such as by a signal or with
    its node, does not even wait. Whoever ends the job may have let it run on for a moment. Clocks of hosts
    may differ by less than half of the silence."""
    least_s = max(STOPPED_S, silent_s / 2)
    stopped = {}
    for rank, beat in beats.items():
        if beat.woke > ended - STOPPED_S and beat.stopped_s > least_s:
            stopped[rank] = beat.stopped_s
        elif beat.doing != SERVING and ended - (beat.time + beat.alive_s) > least_s:
            stopped[rank] = ended - (beat.time + beat.alive_s)
    longest = max(stopped, key=lambda rank: stopped[rank], default=None)
    return {} if longest is None else {longest: stopped[longest]}


def _is_suspect(beat: Heartbeat, ended: float) -> bool:
    """Whether a rank did not wait for another one. A server that waits keeps sending heartbeats."""
    is_silent = beat.doing == SERVING and not beat.is_starting and ended - beat.time > _SERVER_SILENT_S
    return is_silent or not beat.is_waiting


def all_have_begun(run_dir: Path) -> bool:
    """Whether every rank that has not ended well is past its start."""
    beats = [beat for _, beat in heartbeats(run_dir)]
    return bool(beats) and not any(beat.is_starting for beat in beats)


def with_hang(state: JobState, run_dir: Path) -> JobState:
    """A failed state with the rank that hung, if any: the executor knows only which rank ended first."""
    if state.phase != "failed" or (hang := find_hang(run_dir)) is None:
        return state
    return replace(state, rank=hang.rank, exit_code=1, reason=str(hang))


def _stacks(run_dir: Path, rank: int, start: str) -> Path:
    return run_dir / of_start(stacks_name(rank), start)


def heartbeats(run_dir: Path, start: str = EXIT) -> Iterator[tuple[int, Heartbeat]]:
    """The last heartbeats of the ranks of a start that have not ended well; ``start``: its folder."""
    for path in run_dir.glob(of_start(heartbeat_name(0).replace("0", "*"), start)):
        with suppress(OSError, ValueError):  # a file that is none of ours
            data = read_regular(path)
            if len(data) == SIZE:
                yield int(path.stem.removeprefix("rank-")), unpack(data)


def _watchdog_time(stacks: Path, beat: Heartbeat) -> float | None:
    """When the watchdog of a rank ended it, by the clock of its heartbeats; None: it did not."""
    with suppress(OSError):
        status = stacks.stat()
        return (beat.ends or status.st_mtime) if status.st_size else None
    return None


def _main_stack(path: Path) -> str:
    """The stack of the main thread, which faulthandler writes last."""
    with suppress(OSError):
        text = read_regular(path).decode(errors="replace")
        lines = _THREAD.split(text)[-1].splitlines()[1:]
        return "\n".join(lines[:_MAX_FRAMES])
    return ""
