"""Follows runs that others started, a scheduler or another process of this machine, or ends them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.app.lifecycle import EndedRun, report_end
from launcher.app.output import TERMINAL, Output, shown
from launcher.app.progress import Progress, progress_of
from launcher.base.errors import JobError, LauncherError
from launcher.contract.job import JobState
from launcher.report.runs import named_base, read_plan
from launcher.runs.claim import is_launcher, ranks_left
from launcher.runs.state import current_state, current_states, load_handle
from launcher.runs.status import ACTIVE
from launcher.runs.store import RunDirectory
from launcher.runs.watch import StopSignal

ASK_INTERVAL_S = 2.0
"""Time between two questions to a scheduler."""
_DRAW_INTERVAL_S = 0.2
END_TIMEOUT_S = 30
"""Longest wait for runs to end: ranks that save first may take more."""
_END_INTERVAL_S = 0.5


def wait_for_run(directory: RunDirectory, output: Output = TERMINAL) -> EndedRun:
    """Follows a run to its end, then its baseline where that has not ended, and says how they ended.

    Raises:
        LauncherError: when its scheduler gives no answer.
    """
    run = EndedRun(directory=directory, state=_wait_with_steps(directory, output))
    if run.state.phase == "cancelled":
        output.warn(f"cancelled. Run directory: {shown(directory.path)}")
        return run
    base = named_base(directory.path)
    if run.state.phase == "succeeded" and base:
        wait_for_baseline(base, output)
    report_end(run, output)
    return run


def wait_for_baseline(base: Path, output: Output) -> None:
    """Follows the baseline of a run that has succeeded to its end."""
    directory = RunDirectory(base)
    if current_state(directory).phase in ACTIVE:
        output.event(f"succeeded; waits for the baseline {shown(base)}")
        _wait_with_steps(directory, output)


def _wait_with_steps(directory: RunDirectory, output: Output) -> JobState:
    progress = progress_of(directory, read_plan(directory.path), output.stream)
    return wait_for_end(directory, output, progress)


def wait_for_end(
    directory: RunDirectory, output: Output, progress: Progress | None = None, stop: StopSignal | None = None
) -> JobState:
    """Follows a run that others started to its end, and says how its state changes.

    ``progress`` shows its steps. A request to ``stop`` cancels its job; without one the run is left alone.
    """
    said = ""
    while (state := current_state(directory)).phase in ACTIVE:
        if stop is not None and stop.signal is not None:
            _end(directory)
            return JobState(phase="cancelled", exit_code=stop.exit_code, reason=stop.signal.name)
        text = f"{state.phase}: {state.reason}" if state.reason else state.phase
        if text != said:
            if progress is not None:
                progress.close()
            output.event(text)
            said = text
        until = time.monotonic() + ASK_INTERVAL_S
        while time.monotonic() < until and (stop is None or stop.signal is None):
            if progress is not None and state.phase == "running":
                progress.update()
            time.sleep(_DRAW_INTERVAL_S)
    if progress is not None:
        progress.update()
        progress.close()
    return state


def going(directories: Sequence[RunDirectory]) -> list[RunDirectory]:
    """The runs that have not ended."""
    found = zip(directories, current_states(directories), strict=True)
    return [run for run, state in found if state.phase in ACTIVE]


def end_runs(directories: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Ends all ranks of runs that have not ended, and waits for that; returns those that still run.

    Raises:
        LauncherError: when one cannot be ended from here.
    """
    errors = []
    for directory in directories:
        try:
            _end(directory)
        except LauncherError as error:  # the others are ended all the same
            errors.append(str(error))
    if errors:
        raise JobError("\n".join(errors))
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := going(directories):
        if time.monotonic() > deadline:
            return left
        time.sleep(_END_INTERVAL_S)
    return []


def going_baselines(directories: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Baselines that have not ended: they were submitted beside these runs, and others may need them."""
    bases = {base for run in directories if (base := named_base(run.path))}
    return going([RunDirectory(base) for base in sorted(bases)])


def _end(directory: RunDirectory) -> None:
    if (job := load_handle(directory)) is not None:
        executor, handle = job
        executor.cancel(handle)
        return
    status = directory.status()
    if not status.is_of_this_host:
        raise LauncherError(f"the run was started on {status.hostname or 'another machine'}: cancel it there")
    if status.is_followed:
        assert status.pid is not None, "a run is followed by a process"
        if not status.birth or not is_launcher(status.pid, directory.path):
            raise LauncherError(
                f"status.json names process {status.pid}, and it cannot be told whether that follows the "
                f"run. See what it is, then end it: ps {status.pid}; kill {status.pid}"
            )
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(status.pid, signal.SIGTERM)  # the launcher that follows it ends the ranks
        return
    for pid in ranks_left(directory.path).values():  # a stopped one would not hear another signal
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
