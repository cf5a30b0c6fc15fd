"""The heartbeat of a rank: the time, its step, what it is doing, and how long it has run on since.

A few bytes in ``exit/rank-N.heartbeat``, overwritten each time. A rank without a heartbeat for
``run.timeout_s``, or without a step ``run.start_timeout_s`` after its start, writes its stacks to
``exit/rank-N.stacks`` and ends; both files are removed when a rank ends well.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.contract.records import (
    COLLECTIVE_KINDS,
    COMPUTE,
    INPUT,
    OTHER,
    PIPELINE,
    REPLICATED,
    SERVER,
    SINGLE_RANK,
)

PEERS = "peers"
"""Blocked in a message to all ranks that is not part of a step: the end, a save, a resume."""
SERVING = "serving"
"""A rank without a model that waits for requests."""
UPDATING = "updating"
"""A rank without a model that handles a request."""
BUILDING, LOADING, RESTORING = "building", "loading", "restoring"
"""Phases of the start."""
DOING: Mapping[str, str] = {
    COMPUTE: "in a forward or backward",
    REPLICATED: "in the optimizer",
    SINGLE_RANK: "in an evaluation, a checkpoint or its records",
    INPUT: "waiting for data",
    PIPELINE: "waiting for another stage",
    SERVER: "waiting for a server",
    SERVING: "waiting for ranks to serve",
    UPDATING: "serving other ranks",
    BUILDING: "building the model",
    LOADING: "opening the data",
    RESTORING: "reading a checkpoint",
    OTHER: "between two parts of a step",
    **dict.fromkeys((*COLLECTIVE_KINDS, PEERS), "waiting for other ranks"),
}
"""Everything that a rank can be doing, with the text for it."""
WAITING = frozenset((*COLLECTIVE_KINDS, PIPELINE, SERVER, PEERS, SERVING))
"""Those of them in which it waits for another rank."""
_FORMAT, _ALIVE, _WOKE = struct.Struct("<dqd16s"), struct.Struct("<d"), struct.Struct("<dd")
SIZE = _FORMAT.size + _ALIVE.size + _WOKE.size
"""Bytes of the file."""
STOPPED_S = 5.0
"""A process that did not run for so long was stopped, or its node was: it notes every second that it runs."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last heartbeat of a rank."""

    time: float
    """`launcher.base.timestamps.steady_time` of the rank."""
    step: int
    """0-based; -1 before the first."""
    doing: str
    """A key of `DOING`."""
    ends: float = 0.0
    """When the watchdog ends the rank unless it gives another; 0: not known."""
    alive_s: float = 0.0
    """Seconds after ``time`` for which the process is known to have run: not while it was stopped."""
    woke: float = 0.0
    """When it ran again after it had been stopped, by the same clock; 0: it never was."""
    stopped_s: float = 0.0
    """Seconds for which it had been."""

    @property
    def is_waiting(self) -> bool:
        """Whether it was waiting for another rank."""
        return self.doing in WAITING

    def __str__(self) -> str:
        if self.is_starting:
            return "in its start" if self.doing == OTHER else f"{self._words} before the first step"
        return f"{self._words} of step {self.step + 1}"

    @property
    def is_starting(self) -> bool:
        """Whether it was before its first step."""
        return self.step < 0

    @property
    def _words(self) -> str:
        return DOING.get(self.doing, self.doing)


def heartbeat_name(rank: int) -> str:
    """The file of a rank's heartbeat, inside the run directory."""
    return f"exit/rank-{rank}.heartbeat"


def stacks_name(rank: int) -> str:
    """The file with the stacks of a rank that hung, inside the run directory; empty while it has not."""
    return f"exit/rank-{rank}.stacks"


def pack_into(
    buffer: bytearray | memoryview, time: float, step: int, doing: bytes, ends: float = 0.0
) -> None:
    """Writes a heartbeat over the one before; ``doing`` is a key of `DOING`, encoded."""
    _FORMAT.pack_into(buffer, 0, time, step, ends, doing)
    pack_alive(buffer, 0.0)


def pack_alive(buffer: bytearray | memoryview, alive_s: float) -> None:
    """Writes into a heartbeat that the process has run until ``alive_s`` after it."""
    _ALIVE.pack_into(buffer, _FORMAT.size, alive_s)


def pack_woke(buffer: bytearray | memoryview, woke: float, stopped_s: float) -> None:
    """Writes into a heartbeat that the process runs again since ``woke``, after ``stopped_s``."""
    _WOKE.pack_into(buffer, _FORMAT.size + _ALIVE.size, woke, stopped_s)


def unpack(data: bytes) -> Heartbeat:
    """Reads what `pack_into` wrote.

    >>> file = bytearray(SIZE)
    >>> pack_into(file, 1.5, 6, b"compute")
    >>> print(unpack(file))
    in a forward or backward of step 7
    """
    time, step, ends, doing = _FORMAT.unpack_from(data)
    (alive_s,) = _ALIVE.unpack_from(data, _FORMAT.size)
    woke, stopped_s = _WOKE.unpack_from(data, _FORMAT.size + _ALIVE.size)
    return Heartbeat(
        time=time,
        step=step,
        doing=doing.rstrip(b"\0").decode(),
        ends=ends,
        alive_s=alive_s,
        woke=woke,
        stopped_s=stopped_s,
    )
