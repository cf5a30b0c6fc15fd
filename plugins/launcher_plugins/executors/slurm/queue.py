"""The states of several jobs: from squeue, then from sacct, in one command each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.base.errors import JobError
from launcher.contract.job import JOB_RECORD, JobState
from launcher_plugins.executors.slurm.commands import run_command
from launcher_plugins.executors.slurm.state import (
    SACCT_FIELDS,
    SQUEUE_FIELDS,
    from_record,
    read_sacct,
    read_squeue,
)

STARTS = "logs/starts"
"""One line per start of the ranks, written by the script."""
_SQUEUE = ("squeue", "--noheader", "--all", "--array", "--states=all", f"--Format={SQUEUE_FIELDS}")
_SACCT = ("sacct", "-X", "-P", "-n", "-D", f"--format={SACCT_FIELDS}")
_MOST = 500
"""Most ids in one command."""
_FORGOTTEN = "Invalid job id"
_NO_CLUSTER = "configuration source"


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """What Slurm reported about some jobs."""

    states: dict[str, JobState]
    squeue_error: str
    """Why squeue failed; empty where it did not."""

    def state(self, job: str, run_dir: str) -> JobState:
        """The state of a job; for one that Slurm no longer knows, by its own record.

        Raises:
            JobError: when squeue failed and the job has left no record.
        """
        if job in self.states:
            return self.states[job]
        record = Path(run_dir) / JOB_RECORD
        text = record.read_text(encoding="utf-8") if record.is_file() else ""
        if (left := from_record(text, job)) is not None:
            return left
        if self.squeue_error:
            hint = (
                ". Set SLURM_CONF to the cluster's configuration" if _NO_CLUSTER in self.squeue_error else ""
            )
            raise JobError(f"Slurm does not report the state of job {job}: {self.squeue_error}{hint}")
        if not (Path(run_dir) / STARTS).is_file():
            # Slurm forgets no queued job, except a task of an array that was cancelled before its start.
            return JobState(phase="cancelled", reason="left the queue before it started")
        return JobState(
            phase="failed", reason=f"Slurm no longer knows job {job}, and it left no record of its end"
        )


def ask_about(jobs: Sequence[str]) -> Jobs:
    """Asks for the states of jobs: single ones, array tasks (``7_3``), or leaders of het jobs."""
    states: dict[str, JobState] = {}
    squeue_error = ""
    for batch in _batches(jobs):
        live = run_command((*_SQUEUE, f"--jobs={','.join(batch)}"))
        if live.code and _FORGOTTEN not in live.error:
            squeue_error = live.error
        states |= read_squeue(live.output, batch)
    for batch in _batches([job for job in jobs if job not in states]):
        accounts = run_command((*_SACCT, f"--jobs={','.join(batch)}"))
        if accounts.code == 0:
            states |= read_sacct(accounts.output, batch)
    return Jobs(states=states, squeue_error=squeue_error)


def with_time(state: JobState, run_dir: str) -> JobState:
    """A state with its time, by the files that the script writes at its start and its end."""
    left = {"running": STARTS, "succeeded": JOB_RECORD, "failed": JOB_RECORD, "cancelled": JOB_RECORD}
    with suppress(OSError, KeyError):
        return replace(state, since_s=(Path(run_dir) / left[state.phase]).stat().st_mtime)
    return state


def _batches(jobs: Sequence[str]) -> Iterator[Sequence[str]]:
    return (jobs[first : first + _MOST] for first in range(0, len(jobs), _MOST))
