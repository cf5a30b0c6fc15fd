"""Follows a job from its start to its end, and ends it when this process receives a signal to stop.

Ranks that save are asked to stop first, and waited for; a second signal, or the end of
``JobScript.save_wait_s``, kills them.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from launcher.base.units import format_duration
from launcher.contract.executor import Executor
from launcher.contract.job import STOP_NOTE, JobHandle, JobScript, JobState
from launcher.runs.failure import rank_failures, with_cause
from launcher.runs.hang import all_have_begun, find_hang

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_AT_ONCE = (signal.SIGINT, signal.SIGTERM)
"""Signals that end the ranks without a checkpoint when they follow another one."""
_REPEAT_S = 0.5
"""Time in which a repeated signal is the same request: terminals and wrappers may send it twice."""
_INTERVAL_S = 0.1


class StopSignal:
    """Whether this process received a signal to stop.

    A flag, not an exception: an exception could be raised between the start of a job and the point from
    which it would be ended.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.at_once: signal.Signals | None = None
        """A later signal, after which nothing is waited for."""
        self._received_at = 0.0

    @property
    def exit_code(self) -> int:
        """The shell's exit code of a process ended by the signal."""
        assert self.signal is not None, "no signal to stop"
        return 128 + self.signal

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: keeps the first signal, and the first of `_AT_ONCE` after it."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = signal.Signals(number), now
        elif number in _AT_ONCE and now - self._received_at > _REPEAT_S:
            self.at_once = self.at_once or signal.Signals(number)


@contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """While open, handles Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal as requests to stop.

    A signal that was ignored stays ignored: nohup starts programs so, and shells those of the background.
    Only the main thread of a program is given signals; in another thread there are no requests.
    """
    request = StopSignal()
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in _SIGNALS if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, request.receive) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(
    executor: Executor,
    script: JobScript,
    stop: StopSignal,
    on_tick: Callable[[], None],
    warn: Callable[[str], None],
) -> JobState:
    """Starts a job and returns its final state; in any case none of its ranks is left.

    ``on_tick`` is called about ten times a second, and once after the end. The job goes on where nobody reads
    our output any more.
    """
    handle = executor.submit(script)
    try:
        while (state := executor.state(handle)).phase in ("pending", "running"):
            if stop.signal is not None:
                return _stopped(executor, handle, script, stop, on_tick, warn)
            with surviving_lost_output(reader=True):
                on_tick()
            time.sleep(_INTERVAL_S)
        with surviving_lost_output(reader=True):
            on_tick()
        return with_cause(state, Path(script.run_dir))
    finally:
        executor.cancel(handle)


def _stopped(
    executor: Executor,
    handle: JobHandle,
    script: JobScript,
    stop: StopSignal,
    on_tick: Callable[[], None],
    warn: Callable[[str], None],
) -> JobState:
    """Asks the ranks of a job to save and stop, where they can; the final state. The caller ends what is left
    of it."""
    assert stop.signal is not None, "no signal to stop"
    _drop_lost_output()
    ended = JobState(phase="cancelled", exit_code=stop.exit_code, reason=stop.signal.name)
    if not script.save_wait_s or not executor.request_stop(handle):
        return ended
    asked_at, most_s = time.monotonic(), format_duration(script.save_wait_s)
    is_shown = False
    while (state := executor.state(handle)).phase in ("pending", "running"):
        waited_s = time.monotonic() - asked_at
        if waited_s > _REPEAT_S and not is_shown:
            is_shown = True
            text = (
                f"\nstopped by {ended.reason}: the ranks finish their step and save; this waits at most "
                f"{most_s} (executor.save_wait_s). Ctrl-C again ends them at once."
            )
            with suppress(OSError):
                warn(text)
        unsaved = f"a second signal, {stop.at_once.name}" if stop.at_once else ""
        if waited_s > script.save_wait_s:
            unsaved = f"the end of executor.save_wait_s = {most_s}"
        if unsaved:
            return JobState(
                phase="cancelled",
                exit_code=stop.exit_code,
                reason=f"{ended.reason} and, before the ranks had ended, {unsaved}",
            )
        _drop_lost_output()
        with suppress(OSError):
            on_tick()
        time.sleep(_INTERVAL_S)
    _drop_lost_output()
    run_dir = Path(script.run_dir)
    if state.phase == "failed" and all_have_begun(run_dir) and (rank_failures(run_dir) or find_hang(run_dir)):
        return with_cause(state, run_dir)
    is_finished = state.phase == "succeeded" and not (run_dir / STOP_NOTE).exists()
    return state if is_finished else ended  # the last step may have been done meanwhile


@contextmanager
def surviving_lost_output(*, reader: bool) -> Iterator[None]:
    """Drops what is printed inside, and all that follows, once the terminal that it goes to is gone; with
    ``reader`` also once the program that reads it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in ((errno.EIO, errno.EPIPE) if reader else (errno.EIO,)):
            raise
        _drop_lost_output()


def _drop_lost_output() -> None:
    """Redirects output to the null device where its terminal or reader is gone, too."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if poll.poll(0):  # an error or a hang-up: nothing else was asked for
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
