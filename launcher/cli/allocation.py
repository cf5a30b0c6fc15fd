"""Whether the allocation that `trireme run` was started inside of lasts as long as the run."""

from __future__ import annotations

import os

from launcher import registry
from launcher.errors import JobError
from launcher.executor import KnowsAllocation
from launcher.jobs.store import RunDirectory, saved_steps
from launcher.plan.model import Plan
from launcher.units import format_duration

_INSIDE = {"slurm": "SLURM_JOB_ID"}
"""The executors whose allocations are known from inside, and the variable that each sets there."""


def allocation_notes(plan: Plan, directory: RunDirectory) -> tuple[str, ...]:
    """Says that a run would be cut short, by its predicted time."""
    names = [name for name, variable in _INSIDE.items() if os.environ.get(variable)]
    if not names or names[0] not in registry.plugins("launcher.executors"):
        return ()
    executor = registry.load("launcher.executors", names[0])
    job = os.environ[_INSIDE[names[0]]]
    assert isinstance(executor, KnowsAllocation), "an executor that is asked what it does not know"
    try:
        left_s = executor.time_left_s(job)
    except JobError:  # the machine has none of its commands: nothing is known
        return ()
    *_, done = (0, *saved_steps(directory.path))
    needed_s = (plan.config.train.num_steps - done) * plan.schedule.step_s
    if left_s is None or needed_s <= left_s:
        return ()
    cut = "Set train.checkpoint_interval, so that --resume can go on,"
    if plan.config.train.checkpoint_interval:
        cut = "Go on with --resume,"
    return (
        f"Job {job}, which this runs inside of, ends in {format_duration(left_s)}, and the run is predicted "
        f"to take {format_duration(needed_s)}: it would be cut short. {cut} or ask for a longer time.",
    )
