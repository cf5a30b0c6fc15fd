"""The ranks of a measurement: started on this machine or by a scheduler, and waited for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from launcher.app.ending import say, shown
from launcher.app.frozen_job import Material, submit_plan
from launcher.app.launch import local_faults
from launcher.base.errors import ConfigError, PlanError
from launcher.base.secrets import secret_values
from launcher.contract.job import JobState
from launcher.contract.plan import Plan
from launcher.plan.rules.checks import with_sources
from launcher.runs.facts import checkouts, environment_facts
from launcher.runs.failure import failure_text
from launcher.runs.freeze import frozen_plan
from launcher.runs.handle import load_handle, standing
from launcher.runs.record import Origin, write_job
from launcher.runs.render import executor_of, render
from launcher.runs.store import ACTIVE, RunDirectory, expected_path, new_directory
from launcher.runs.watch import StopRequest, follow, stop_requests
from launcher.typed.read import Source

_ASK_INTERVAL_S = 2.0


def start_and_wait(
    plan: Plan, overrides: tuple[str, ...], sources: Mapping[str, Source]
) -> tuple[RunDirectory, int]:
    """Runs the ranks to their end, in a new run directory; an exit code of 0 means that all succeeded.

    Raises:
        LauncherError: when they cannot be started.
    """
    is_local = executor_of(plan).is_local
    _check(plan, sources, is_local=is_local)
    directory = new_directory(plan.config.run, plan.config.name)
    say(f"run directory: {shown(directory.path)}")
    origin = Origin(recipe="", overrides=overrides, facts=environment_facts(), checkouts=checkouts())
    with stop_requests() as stop:
        try:
            run = _run_here if is_local else _run_there
            state = run(directory, plan, origin, stop)
        except BaseException:
            directory.write_status("failed")
            raise
    directory.write_state(state)
    return directory, _told(directory, state)


def _told(directory: RunDirectory, state: JobState) -> int:
    """The exit code of how it ended; says why where that was too early."""
    if state.phase == "cancelled":
        print(f"stopped by {state.reason}: all ranks have ended", file=sys.stderr)
        return state.exit_code or 1
    if state.phase == "failed":
        print(failure_text(directory.path, state), file=sys.stderr)
        return 1
    return 0


def _check(plan: Plan, sources: Mapping[str, Source], *, is_local: bool) -> None:
    """Refuses before anything is made."""
    faults = local_faults(plan) if is_local else []
    if faults:
        raise ConfigError(with_sources(faults, sources))
    path = expected_path(plan.config.run, plan.config.name)
    try:
        render(plan if is_local else frozen_plan(plan, path), path)
    except PlanError as error:
        raise PlanError(with_sources(error.faults, sources)) from None


def _run_here(directory: RunDirectory, plan: Plan, origin: Origin, stop: StopRequest) -> JobState:
    script = render(plan, directory.path)
    write_job(directory, plan, script, origin)
    directory.write_status("running")
    return follow(executor_of(plan), script, stop, lambda: None)


def _run_there(directory: RunDirectory, plan: Plan, origin: Origin, stop: StopRequest) -> JobState:
    """Submits the job and asks for it until it has ended; a request to stop cancels it."""
    secrets = secret_values(os.environ, plan.config.site.secrets)
    handle, _ = submit_plan(directory, plan, Material(origin=origin, patterns=(), secrets=secrets))
    say(f"submitted as job {handle.id}")
    told = ""
    while (state := standing(directory)).phase in ACTIVE:
        if stop.signal is not None:
            loaded = load_handle(directory)
            assert loaded is not None, "the job was noted when it was submitted"
            executor, job = loaded
            executor.cancel(job)
            return JobState(phase="cancelled", exit_code=stop.exit_code, reason=stop.signal.name)
        if state.phase != told:
            told = state.phase
            say(told)
        time.sleep(_ASK_INTERVAL_S)
    return state
