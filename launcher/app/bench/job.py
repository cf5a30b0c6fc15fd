"""The ranks of a measurement: started on this machine or by a scheduler, and waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.app.checks import executor_faults, refuse
from launcher.app.lifecycle import EndedRun, PreparedRun, freeze_and_submit, origin_of
from launcher.app.output import Output, shown
from launcher.app.wait import wait_for_end
from launcher.contract.job import JobState
from launcher.contract.plan import Plan
from launcher.runs.failure import failure_text
from launcher.runs.record import Origin
from launcher.runs.render import executor_of
from launcher.runs.store import RunDirectory, expected_path, new_directory
from launcher.runs.watch import StopRequest, follow, stop_requests
from launcher.typed.read import Source


def start_and_wait(
    plan: Plan, overrides: Sequence[str], sources: Mapping[str, Source], output: Output
) -> EndedRun:
    """Runs the ranks to their end, in a new run directory, and says why where that was too early.

    Raises:
        LauncherError: when they cannot be started.
    """
    is_local = executor_of(plan).is_local
    path = expected_path(plan.config.run, plan.config.name)
    expected = PreparedRun(plan=plan, directory=RunDirectory(path), code=None if is_local else path)
    refuse(executor_faults(expected, is_here=is_local), sources)
    directory = new_directory(plan.config.run, plan.config.name)
    output.say(f"run directory: {shown(directory.path)}")
    run = PreparedRun(plan=plan, directory=directory, code=None if is_local else directory.path)
    origin = origin_of("", overrides)
    with stop_requests() as stop:
        try:
            state = _run_here(run, origin, stop) if is_local else _run_there(run, origin, stop, output)
        except BaseException:
            directory.write_status("failed")
            raise
    directory.write_state(state)
    if state.phase == "cancelled":
        output.warn(f"stopped by {state.reason}: all ranks have ended")
    elif state.phase == "failed":
        output.warn(failure_text(directory.path, state))
    return EndedRun(directory=directory, state=state)


def _run_here(run: PreparedRun, origin: Origin, stop: StopRequest) -> JobState:
    run.record(origin)
    run.directory.write_status("running")
    return follow(run.executor, run.script, stop, lambda: None)


def _run_there(run: PreparedRun, origin: Origin, stop: StopRequest, output: Output) -> JobState:
    """Submits the job and waits until it has ended; a request to stop cancels it."""
    handle, _ = freeze_and_submit(run, origin)
    output.say(f"submitted as job {handle.id}")
    return wait_for_end(run.directory, output, stop=stop)
