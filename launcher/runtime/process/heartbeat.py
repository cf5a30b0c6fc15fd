"""A rank's heartbeat, and the watchdog that ends the rank when it stops, or when its start takes too long.

The watchdog is faulthandler's thread, which does not need the GIL: it also ends a rank that hangs in C code,
after writing the stack of each of its threads.
"""

from __future__ import annotations

import faulthandler
import mmap
import threading
from pathlib import Path

from launcher.base.files import naming
from launcher.base.lock import Lease
from launcher.base.timestamps import steady_time
from launcher.contract.heartbeat import (
    DOING,
    SIZE,
    STOPPED_S,
    heartbeat_name,
    pack_alive,
    pack_into,
    pack_woke,
    stacks_name,
)
from launcher.contract.job import RunConfig
from launcher.contract.records import OTHER

MESSAGE_GRACE_S = 2.0
"""How much longer than the watchdog a message waits for a hung rank: the watchdog reports where it waited."""
_ALIVE_INTERVAL_S = 1.0
"""Time between two proofs that the process runs, by a thread: one that waits for others does, too."""
_MOST_BETWEEN_S = 1.0
"""Longest time between two resets of the watchdog, which may fire as much too early: a reset takes too long
to be done at every beat."""


def message_timeout_s(limits: RunConfig) -> float:
    """How long a message waits for another rank: longer than any watchdog, which knows which rank hung."""
    return max(limits.timeout_s, limits.start_timeout_s) + MESSAGE_GRACE_S


class HeartbeatWriter:
    """Records what the rank is doing whenever that changes; one per process."""

    def __init__(
        self, run_dir: Path, rank: int, timeout_s: float, start_timeout_s: float, lease: Lease | None = None
    ) -> None:
        """From now on the rank has ``start_timeout_s`` until its first step (`end_startup`), beats or not.
        ``lease``: this rank's part in the lock of its run directory, asked at every beat."""
        self._paths = [run_dir / heartbeat_name(rank), run_dir / stacks_name(rank)]
        beats, stacks = self._paths
        beats.parent.mkdir(exist_ok=True)
        with naming(beats):
            beats.write_bytes(bytes(SIZE))
        with beats.open("r+b") as file:
            self._beats = mmap.mmap(file.fileno(), SIZE)
        self._stacks = stacks.open("w", encoding="utf-8")
        self._timeout_s = timeout_s
        self._between_s = min(_MOST_BETWEEN_S, timeout_s / 10)
        self._words = {doing: doing.encode() for doing in DOING}
        self._set_at = float("inf")
        """When the watchdog was last reset."""
        self._lease = lease
        self._ends = steady_time() + start_timeout_s
        """When it ends the rank unless it is reset."""
        self.step = -1
        self._is_closed = threading.Event()
        self.beat(OTHER)
        self._living = threading.Thread(target=self._live, name="heartbeat", daemon=True)
        self._living.start()
        faulthandler.dump_traceback_later(start_timeout_s, exit=True, file=self._stacks)

    def beat(self, doing: str) -> None:
        """Records what the rank is doing from now on; a key of `DOING`."""
        if self._lease is not None:
            self._lease.check()
        now = self._beat_at = steady_time()
        if now - self._set_at > self._between_s:
            self.end_startup()
        pack_into(self._beats, now, self.step, self._words[doing], self._ends)  # type: ignore[arg-type]

    def may_write(self) -> None:
        """Ends the rank where its run directory is another's by now."""
        if self._lease is not None:
            self._lease.check(anew=True)

    def _live(self) -> None:
        ran_at = steady_time()
        while not self._is_closed.wait(_ALIVE_INTERVAL_S):
            now = steady_time()
            if now - ran_at > STOPPED_S:
                pack_woke(self._beats, now, now - ran_at)  # type: ignore[arg-type]
            ran_at = now
            pack_alive(self._beats, now - self._beat_at)  # type: ignore[arg-type]

    def end_startup(self) -> None:
        """Resets the watchdog: from now on the rank is ended when it does not beat for the timeout."""
        self._set_at = steady_time()
        self._ends = self._set_at + self._timeout_s
        faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._stacks)

    def close(self) -> None:
        """Stops the watchdog and removes the files."""
        faulthandler.cancel_dump_traceback_later()
        self._is_closed.set()
        self._living.join()
        self._beats.close()
        self._stacks.close()
        if self._lease is not None:
            self._lease.release()
        for path in self._paths:
            path.unlink(missing_ok=True)
