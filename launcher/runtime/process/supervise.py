"""A rank whose failure is not the job's: it runs in a child process, and its parent exits with 0 in any case.

Process starters (torchrun, srun) end all ranks when one fails. An architecture that continues without a rank
has the rank started in this way, by a fork before torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from launcher.runtime.process.log import log

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


def supervise(run: Callable[[], int]) -> int:
    """Calls ``run`` in a child process; returns 0 once that has ended, in any way."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        end_with(parent)
        os._exit(run())

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        log(f"this rank ended with status {code}; the others continue without it")
    return 0


def end_with(parent: int) -> None:
    """Has this process, a fork of ``parent``, end when that does."""
    if sys.platform == "linux":  # the kernel kills it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)
