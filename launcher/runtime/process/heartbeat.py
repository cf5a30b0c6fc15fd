"""A rank's heartbeat, and the watchdog that ends the rank when it stops, or when its start takes too long.

The watchdog is a thread of the interpreter's own, which needs no lock of Python's: it ends a rank that
hangs in C code, too, after writing where each of its threads is.
"""

from __future__ import annotations

import faulthandler
import mmap
import time
from pathlib import Path

from launcher.contract.config import RunConfig
from launcher.contract.heartbeat import DOING, SIZE, heartbeat_name, pack_into, stacks_name
from launcher.contract.records import OTHER

MESSAGE_GRACE_S = 2.0
"""How much longer than the watchdog a message waits for a hung rank: the watchdog says where it waited."""
_MOST_BETWEEN_S = 1.0
"""Longest time by which the watchdog may be early: setting it takes too long to be done at every beat."""


def message_timeout_s(limits: RunConfig) -> float:
    """How long a message waits for another rank: no shorter than any watchdog, which knows who hung."""
    return max(limits.timeout_s, limits.start_timeout_s) + MESSAGE_GRACE_S


class Heart:
    """Beats whenever the rank begins something else; made once per process."""

    def __init__(self, run_dir: Path, rank: int, timeout_s: float, start_timeout_s: float) -> None:
        """From now on the rank has ``start_timeout_s`` until its first step (`watch`), beats or not."""
        self._paths = [run_dir / heartbeat_name(rank), run_dir / stacks_name(rank)]
        beats, stacks = self._paths
        beats.parent.mkdir(exist_ok=True)
        beats.write_bytes(bytes(SIZE))
        with beats.open("r+b") as file:
            self._beats = mmap.mmap(file.fileno(), SIZE)
        self._stacks = stacks.open("w", encoding="utf-8")
        self._timeout_s = timeout_s
        self._between_s = min(_MOST_BETWEEN_S, timeout_s / 10)
        self._words = {doing: doing.encode() for doing in DOING}
        self._set_at = float("inf")
        """When the watchdog was set last."""
        self.step = -1
        self.beat(OTHER)
        faulthandler.dump_traceback_later(start_timeout_s, exit=True, file=self._stacks)

    def beat(self, doing: str) -> None:
        """Tells what the rank is at from now on; a key of `DOING`."""
        now = time.time()
        pack_into(self._beats, now, self.step, self._words[doing])  # type: ignore[arg-type]
        if now - self._set_at > self._between_s:
            self.watch()

    def watch(self) -> None:
        """The start is over: from now on the rank ends when it is not heard from for the timeout."""
        self._set_at = time.time()
        faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._stacks)

    def close(self) -> None:
        """Ends the watch, and leaves no file."""
        faulthandler.cancel_dump_traceback_later()
        self._beats.close()
        self._stacks.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
