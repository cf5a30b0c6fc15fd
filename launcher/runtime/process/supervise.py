"""A rank whose end is not the job's: it runs in a child process, and its parent ends well whatever happens.

Process starters (torchrun, srun) end all ranks when one fails. An architecture that goes on without a rank
has the rank started this way, by a fork before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


def supervise(run: Callable[[], int]) -> int:
    """Calls ``run`` in a child process; returns 0 when that has ended, in whatever way."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _end_with(parent)
        os._exit(run())

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        sys.stdout.write(f"this rank ended with status {code}; the others go on without it\n")
        sys.stdout.flush()
    return 0


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
