"""Writes the figures of a run into the file of ``run.prometheus``, as long as somebody follows the run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.app.beside.figures import Figures
from launcher.base.files import naming, unfinished_path
from launcher.contract.job import Phase
from launcher.contract.plan import Plan
from launcher.runs.alarms.notify import notifying
from launcher.runs.status import ACTIVE
from launcher.runs.store import RunDirectory

_INTERVAL_S = 15.0
_FOR_ALL = 0o644
"""The collector is another user, and what it collects is shown to others anyway."""


class Exporter:
    """A thread that writes the figures now and then. What goes wrong is told once, and ends nothing."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: Plan,
        say: Callable[[str], None],
        interval_s: float = _INTERVAL_S,
    ) -> None:
        assert plan.config.run.prometheus is not None, "no file to write to"
        self._file = directory.path / os.path.expanduser(plan.config.run.prometheus)
        self._figures, self._say, self._interval_s = Figures(directory, plan), say, interval_s
        self._has_failed = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="prometheus", daemon=True)
        self._thread.start()

    def close(self, phase: Phase | None) -> None:
        """Writes them a last time, with the phase that the run is in now; None: that is not known."""
        self._closed.set()
        self._thread.join()
        if phase is not None:
            self._write(phase)

    def _follow(self) -> None:
        self._write("running")
        while not self._closed.wait(self._interval_s):
            self._write("running")

    def _write(self, phase: Phase) -> None:
        try:
            write_for_all(self._file, self._figures.text(phase))
        except Exception as error:
            if not self._has_failed:
                self._say(f"run.prometheus={self._file}: {error}; this is not told again")
            self._has_failed = True


def write_for_all(path: Path, text: str) -> None:
    """Writes a file that every user may read, whole or not at all; what lies there of somebody else under the
    name that it has meanwhile is not followed."""
    unfinished = unfinished_path(path)
    with naming(path):
        unfinished.unlink(missing_ok=True)
        with unfinished.open("x", encoding="utf-8", errors="replace") as file:
            os.fchmod(file.fileno(), _FOR_ALL)
            file.write(text)
        unfinished.replace(path)


@contextmanager
def beside(directory: RunDirectory, plan: Plan, say: Callable[[str], None]) -> Iterator[None]:
    """While open, the run that this process follows gives its events to ``run.notify``, and its figures to
    ``run.prometheus``."""
    run = plan.config.run
    exporter = Exporter(directory, plan, say) if run.prometheus is not None else None
    phase: Phase = "failed"
    try:
        with notifying(directory.path, run):
            yield
        ended = directory.status().state().phase
        phase = "failed" if ended in ACTIVE else ended
    finally:
        if exporter is not None:
            exporter.close(phase)
