"""The state of a run, whoever has it: a scheduler, or the process that follows it on this machine."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import replace

from launcher.base import registry
from launcher.base.files import read_json
from launcher.contract.executor import Executor
from launcher.contract.job import JobHandle, JobState
from launcher.runs.claim import left_text, ranks_left
from launcher.runs.failure import unless_trained, with_cause
from launcher.runs.store import RunDirectory


def save_handle(directory: RunDirectory, executor: str, handle: JobHandle) -> None:
    """Notes which job a run is, for whoever asks later."""
    directory.write(directory.handle.name, json.dumps({"executor": executor, "id": handle.id}) + "\n")


def load_handle(directory: RunDirectory) -> tuple[Executor, JobHandle] | None:
    """The job of a run and the executor that has it; None for a run that no scheduler has.

    Raises:
        PluginError: when the executor is not installed here.
    """
    saved = read_json(directory.handle)
    if not saved:
        return None
    return registry.load(Executor, saved["executor"]), JobHandle(id=saved["id"], run_dir=str(directory.path))


def current_state(directory: RunDirectory) -> JobState:
    """The state of a run now; as `current_states`."""
    return current_states([directory])[0]


def current_states(directories: Sequence[RunDirectory]) -> list[JobState]:
    """The states of runs now. What a scheduler says is noted in the run directories.

    A scheduler is asked only about runs that have not ended as far as is known, and about all of them
    at once where it can be.

    Raises:
        JobError: when a scheduler gives no answer.
    """
    recorded = [directory.status() for directory in directories]
    states = [status.state() for status in recorded]
    asked: dict[str, list[tuple[int, JobHandle]]] = {}
    for index, (directory, status) in enumerate(zip(directories, recorded, strict=True)):
        if not status.is_active:
            continue
        if handle := read_json(directory.handle):
            job = JobHandle(id=handle["id"], run_dir=str(directory.path))
            asked.setdefault(handle["executor"], []).append((index, job))
        elif status.is_of_this_host and not status.is_followed:
            states[index] = _without_launcher(directory, states[index])
    for name, jobs in asked.items():
        answers = registry.load(Executor, name).states([job for _, job in jobs])
        for (index, _), answer in zip(jobs, answers, strict=True):
            path = directories[index].path
            state = unless_trained(with_cause(answer, path), path)
            if state != states[index]:
                states[index] = _noted(directories[index], state)
    return states


def _noted(directory: RunDirectory, state: JobState) -> JobState:
    """Writes a state down, and gives it with the time since when it is so. Whoever may only read the run is
    told it all the same."""
    try:
        directory.write_state(state)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return state
    return directory.status().state()


def _without_launcher(directory: RunDirectory, recorded: JobState) -> JobState:
    """The state of a run of this machine whose launcher is gone: it goes on while a rank is left."""
    gone = "the launcher that followed it is gone"
    if left := ranks_left(directory.path):
        verb = "is" if len(left) == 1 else "are"
        return replace(recorded, phase="running", reason=f"{gone}, and {left_text(left)} {verb} left")
    return unless_trained(replace(recorded, phase="failed", reason=gone), directory.path)
