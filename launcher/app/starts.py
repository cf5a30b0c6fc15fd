"""The starts of a run on this machine: one, and more where the ranks failed and may be started again."""

from __future__ import annotations

from dataclasses import replace

from launcher.app.ending import progress_of, say
from launcher.base.units import counted
from launcher.contract.job import JobScript, JobState
from launcher.contract.plan import Plan
from launcher.runs.failure import failure_line
from launcher.runs.render import executor_of, render
from launcher.runs.resume import begin_attempt
from launcher.runs.store import RunDirectory, saved_steps
from launcher.runs.watch import StopRequest, follow


def train(directory: RunDirectory, plan: Plan, script: JobScript, stop: StopRequest) -> JobState:
    """Starts the ranks and follows them to the end of their last start, whatever it is."""
    if stop.signal is not None:
        return JobState(phase="cancelled", exit_code=stop.exit_code, reason=stop.signal.name)
    say(f"training on {counted(plan.world_size, 'rank')}")
    num_restarts, running = 0, JobState(phase="running")
    while True:
        directory.write_state(running)
        state, num_done = _follow(directory, plan, script, stop)
        if state.phase != "failed" or num_restarts == script.max_restarts or stop.signal is not None:
            break
        num_restarts += 1
        running = replace(running, reason=f"restart {num_restarts} of {script.max_restarts}")
        say(failure_line(directory.path, state))
        say(f"{running.reason}: {_next_start(directory, num_done)}")
        script = render(plan, directory.path, resume=bool(saved_steps(directory.path)))
        begin_attempt(directory)
    if num_restarts and state.phase != "cancelled":
        after = f"after {counted(num_restarts, 'restart')}"
        state = replace(state, reason=f"{state.reason}, {after}" if state.reason else after)
    directory.write_state(state)
    return state


def _follow(
    directory: RunDirectory, plan: Plan, script: JobScript, stop: StopRequest
) -> tuple[JobState, int]:
    """How one start of the ranks ended, and the steps that were done by then."""
    progress = progress_of(directory, plan)
    state = follow(executor_of(plan), script, stop, progress.update)
    progress.close()
    assert state.phase in ("succeeded", "failed", "cancelled"), f"a job that is {state.phase} was left"
    return state, progress.view.num_done


def _next_start(directory: RunDirectory, num_done: int) -> str:
    """Where the next start begins, and what it makes again."""
    first = max(saved_steps(directory.path), default=0)
    begins = f"goes on after step {first}" if first else "begins anew, as nothing is saved yet"
    return f"{begins}; {counted(num_done - first, 'step')} made again" if num_done > first else begins
