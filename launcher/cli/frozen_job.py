"""Fills a run directory with a plan and the code that it runs, and hands it to a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.jobs.freeze import freeze, frozen_plan
from launcher.jobs.handle import save_handle
from launcher.jobs.record import Origin, write_job
from launcher.jobs.render import executor_of, render
from launcher.jobs.script import JobHandle
from launcher.jobs.secrets import check_folder
from launcher.jobs.store import RunDirectory
from launcher.plan.model import Plan


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
    frozen = frozen_plan(plan, directory.path)
    script = render(frozen, directory.path, resume=resume, after=after)
    copied = freeze(plan.source_roots, directory.path, material.patterns)
    write_job(directory, frozen, script, material.origin)
    check_folder(directory.path, material.secrets)
    handle = executor_of(frozen).submit(script)
    save_handle(directory, frozen.config.executor.name, handle)
    directory.write_status("pending")
    return handle, copied
