"""Follows a job from its start to its end, and ends it when this process is told to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from launcher.interfaces import Executor
from launcher.jobs.hang import with_hang
from launcher.jobs.script import JobScript, JobState

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_INTERVAL_S = 0.1


class StopRequest:
    """Whether this process was told to stop.

    A flag, not an exception: an exception could arise between the start of a job and the moment
    when somebody knows that it has to be ended.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """The shell's exit code of a process ended by the signal."""
        assert self.signal is not None, "nobody asked to stop"
        return 128 + self.signal

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: keeps the first signal."""
        self.signal = self.signal or signal.Signals(number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Takes Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal as requests to stop, while it is open."""
    request = StopRequest()
    before = {number: signal.signal(number, request.receive) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(executor: Executor, script: JobScript, stop: StopRequest, on_tick: Callable[[], None]) -> JobState:
    """Starts a job and returns how it ended; whatever happens, none of its ranks is left.

    ``on_tick`` is called about ten times a second, and once after the end.
    """
    handle = executor.submit(script)
    try:
        while (state := executor.state(handle)).phase in ("pending", "running"):
            if stop.signal is not None:
                return JobState(phase="cancelled", exit_code=stop.exit_code, reason=stop.signal.name)
            on_tick()
            time.sleep(_INTERVAL_S)
        on_tick()
        return with_hang(state, Path(script.run_dir))
    finally:
        executor.cancel(handle)
