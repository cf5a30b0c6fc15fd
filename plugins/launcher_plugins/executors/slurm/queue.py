"""How many jobs stand at once: asked of the controller, then of the accounts, in one command each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.base.errors import JobError
from launcher.contract.job import JobState
from launcher_plugins.executors.slurm.commands import ask
from launcher_plugins.executors.slurm.state import (
    SACCT_FIELDS,
    SQUEUE_FIELDS,
    from_record,
    read_sacct,
    read_squeue,
)

END_RECORD = "exit/job.json"
"""What the script leaves in the run directory of how it ended."""
STARTS = "logs/starts"
"""Where the script notes each start of the ranks."""
_SQUEUE = ("squeue", "--noheader", "--all", "--array", "--states=all", f"--Format={SQUEUE_FIELDS}")
_SACCT = ("sacct", "-X", "-P", "-n", "-D", f"--format={SACCT_FIELDS}")
_MOST = 500
"""Ids that one command is given."""
_FORGOTTEN = "Invalid job id"
_NO_CLUSTER = "configuration source"


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """What is known of some jobs."""

    states: dict[str, JobState]
    silence: str
    """Why the controller gave no answer; empty where it did."""

    def state(self, job: str, run_dir: str) -> JobState:
        """How a job stands; one that nobody knows any more tells by its own record.

        Raises:
            JobError: when the controller gave no answer and the job has left no record.
        """
        if job in self.states:
            return self.states[job]
        record = Path(run_dir) / END_RECORD
        text = record.read_text(encoding="utf-8") if record.is_file() else ""
        if (left := from_record(text, job)) is not None:
            return left
        if self.silence:
            hint = ". SLURM_CONF leads to a cluster" if _NO_CLUSTER in self.silence else ""
            raise JobError(f"Slurm does not say how job {job} stands: {self.silence}{hint}")
        if not (Path(run_dir) / STARTS).is_file():
            # Slurm keeps every job that waits, but of an array no task that was cancelled before its start.
            return JobState(phase="cancelled", reason="left the queue before it started")
        return JobState(phase="failed", reason=f"Slurm forgot job {job}, and it left no record of its end")


def ask_about(jobs: Sequence[str]) -> Jobs:
    """Asks for the states of jobs: single ones, array tasks (``7_3``), or leaders of het jobs."""
    states: dict[str, JobState] = {}
    silence = ""
    for part in _parts(jobs):
        live = ask((*_SQUEUE, f"--jobs={','.join(part)}"), os.environ)
        if live.code and _FORGOTTEN not in live.error:
            silence = live.error
        states |= read_squeue(live.output, part)
    for part in _parts([job for job in jobs if job not in states]):
        accounts = ask((*_SACCT, f"--jobs={','.join(part)}"), os.environ)
        if accounts.code == 0:
            states |= read_sacct(accounts.output, part)
    return Jobs(states=states, silence=silence)


def since_when(state: JobState, run_dir: str) -> JobState:
    """A state with its time, by what the script leaves of its start and of its end."""
    left = {"running": STARTS, "succeeded": END_RECORD, "failed": END_RECORD, "cancelled": END_RECORD}
    with suppress(OSError, KeyError):
        return replace(state, since_s=(Path(run_dir) / left[state.phase]).stat().st_mtime)
    return state


def _parts(jobs: Sequence[str]) -> Iterator[Sequence[str]]:
    return (jobs[first : first + _MOST] for first in range(0, len(jobs), _MOST))
