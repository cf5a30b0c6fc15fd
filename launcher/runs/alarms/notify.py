"""Starts the user's command for each event of a run: mail, chat or a pager can be behind it.

It is run beside the launcher, or the script of a job, and never on the ranks: no step waits for it. It reads
the event from its input as JSON, with the run's directory in ``run``. What goes wrong is a line in
``notify.log`` of the run directory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from launcher.base.redaction import escaped, hide_secrets
from launcher.base.units import format_duration
from launcher.contract.alarms.events import EVENTS, Event, append, events_of, now
from launcher.contract.job import RunConfig
from launcher.typed.read import plain

NOTIFY_LOG = "notify.log"
"""The file of what goes wrong with the command, in the run directory."""
_INTERVAL_S = 0.5
_MOST_AT_END = 3
"""How many time limits the end of a run waits for events that are still to be given."""


def note(run_dir: Path, kind: str, done: str, rank: int | None = None) -> None:
    """Writes an event of the run as a whole; on a full disk nothing."""
    with suppress(OSError):
        append(run_dir, Event(time=now(), kind=kind, rank=rank, done=done))


@contextmanager
def notifying(run_dir: Path, run: RunConfig) -> Iterator[None]:
    """While open, and for what was written until its end, each event of the run starts ``run.notify``."""
    if not run.notify:
        yield
        return
    notifier = Notifier(run_dir, run.notify, run.notify_timeout_s)
    try:
        yield
    finally:
        notifier.close()


class Notifier:
    """A thread that gives every later event of a run to a command, one after the other."""

    def __init__(
        self, run_dir: Path, command: Sequence[str], timeout_s: float, offset: int | None = None
    ) -> None:
        """``offset``: bytes of the events that are known already; None: all that there are now."""
        self._run_dir, self._timeout_s = run_dir, timeout_s
        self._command = [os.path.expanduser(command[0]), *command[1:]]
        self._offset = offset or 0
        with suppress(OSError):
            self._offset = (run_dir / EVENTS).stat().st_size if offset is None else offset
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="notify", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives what is left to the command, and waits for it, but not for long."""
        self._closed.set()
        self._thread.join(_MOST_AT_END * self._timeout_s)

    def _follow(self) -> None:
        while not self._closed.wait(_INTERVAL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        with suppress(OSError), (self._run_dir / EVENTS).open("rb") as file:
            file.seek(self._offset)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offset += len(whole)
            for event in events_of(whole):
                if problem := self._give(event):
                    self._log(event, problem)

    def _give(self, event: Event) -> str:
        """Runs the command for one event; returns what went wrong."""
        text = json.dumps({"run": str(self._run_dir), **plain(event)}).encode()
        with TemporaryFile() as given, TemporaryFile() as said:
            given.write(text + b"\n")
            given.seek(0)
            try:
                process = subprocess.Popen(  # noqa: S603
                    self._command, stdin=given, stdout=said, stderr=said, start_new_session=True
                )
            except (OSError, ValueError) as error:
                return f"it cannot be started: {error}"
            try:
                code = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                problem = f"killed after {format_duration(self._timeout_s)} (run.notify_timeout_s)"
            else:
                problem = f"exit code {code}" if code else ""
            with suppress(OSError):  # whatever it has left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{problem}. {_last_line(said)}".rstrip(" .") if problem else ""

    def _log(self, event: Event, problem: str) -> None:
        with suppress(OSError), (self._run_dir / NOTIFY_LOG).open("a", encoding="utf-8") as log:
            log.write(f"{now()}  {event.kind}: run.notify: {escaped(hide_secrets(problem))}\n")


def _last_line(said: IO[bytes]) -> str:
    said.seek(max(0, said.seek(0, os.SEEK_END) - 500))
    lines = said.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
