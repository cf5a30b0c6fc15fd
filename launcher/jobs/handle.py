"""How a run stands, whoever has it: a scheduler, or the process that follows it on this machine."""

from __future__ import annotations

import json

from launcher import registry
from launcher.interfaces import Executor
from launcher.jobs.script import JobHandle, JobState
from launcher.jobs.store import ACTIVE, RunDirectory, follower, is_alive, read_json


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
    executor: Executor = registry.load("launcher.executors", saved["executor"])
    return executor, JobHandle(id=saved["id"], run_dir=str(directory.path))


def standing(directory: RunDirectory) -> JobState:
    """How a run stands now. What a scheduler says is noted in the run directory.

    A scheduler is asked only about a run that has not ended as far as is known.

    Raises:
        JobError: when the scheduler gives no answer.
    """
    known = directory.state()
    status = read_json(directory.status_file)
    if status.get("phase") not in ACTIVE:
        return known
    if (job := load_handle(directory)) is None:
        pid = follower(directory)
        if pid is not None and not is_alive(pid):
            return JobState(phase="failed", reason="the launcher that followed it is gone")
        return known
    executor, handle = job
    state = executor.state(handle)
    if state != known:
        directory.write_state(state)
    return state
