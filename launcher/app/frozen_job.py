"""Fills a run directory with a plan and the code that it runs, and hands it to a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.secrets import check_folder
from launcher.contract.job import JobHandle, JobScript
from launcher.contract.plan import Plan
from launcher.runs.freeze import freeze, frozen_plan
from launcher.runs.handle import save_handle
from launcher.runs.record import Origin, write_job
from launcher.runs.render import executor_of, render
from launcher.runs.store import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Material:
    """What the jobs of one submission have in common."""

    origin: Origin
    patterns: Sequence[str]
    """Of files that are copied although git does not track them."""
    secrets: Mapping[str, bytes]
    """Values that may stand in no file, by the name of their variable."""


def submit_plan(
    directory: RunDirectory, plan: Plan, material: Material, *, resume: bool = False, after: str = ""
) -> tuple[JobHandle, tuple[str, ...]]:
    """Freezes, records and submits; the job, and the untracked files that were copied.

    Raises:
        LauncherError: when it cannot be submitted.
    """
    copied = freeze(plan.source_roots, directory.path, material.patterns)
    script = record_plan(directory, plan, material.origin, directory.path, resume=resume, after=after)
    check_folder(directory.path, material.secrets)
    return submit_script(directory, plan, script), copied


def record_plan(
    directory: RunDirectory,
    plan: Plan,
    origin: Origin,
    code_in: Path,
    *,
    resume: bool = False,
    after: str = "",
) -> JobScript:
    """Records a run of the code that is frozen in ``code_in``; what submits it."""
    frozen = frozen_plan(plan, code_in)
    script = render(frozen, directory.path, resume=resume, after=after, code_in=code_in)
    write_job(directory, frozen, script, origin)
    return script


def submit_script(directory: RunDirectory, plan: Plan, script: JobScript) -> JobHandle:
    """Hands a recorded run to its scheduler.

    Raises:
        JobError: when that refuses it.
    """
    handle = executor_of(plan).submit(script)
    note_submitted(directory, plan, handle)
    return handle


def note_submitted(directory: RunDirectory, plan: Plan, handle: JobHandle) -> None:
    """Notes in a run directory which job it is."""
    save_handle(directory, plan.config.executor.name, handle)
    directory.write_status("pending")
