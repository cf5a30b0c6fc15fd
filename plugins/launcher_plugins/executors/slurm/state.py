"""The state of a job, from the text output of Slurm and the files of the job.

Text, because the format of Slurm's JSON differs between versions, and its exit codes are wrong in some.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from launcher.contract.job import (
    EXECUTOR_LOG,
    NODE_NOTE,
    SECONDARY_EXIT_CODES,
    STOP_NOTE,
    JobState,
    Phase,
    RankEnd,
)
from launcher_plugins.executors.slurm.commands import rows
from launcher_plugins.executors.slurm.nodelist import expand
from launcher_plugins.executors.torchrun import ending, failed_by
from launcher_plugins.executors.torchrun import failed_state as torchrun_state

PHASES: dict[str, Phase] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"), "pending"),
    **dict.fromkeys(("RESV_DEL_HOLD", "SPECIAL_EXIT", "SUSPENDED", "STOPPED"), "pending"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"), "running"),
    "COMPLETED": "succeeded",
    **dict.fromkeys(("CANCELLED", "REVOKED"), "cancelled"),
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"), "failed"),
    **dict.fromkeys(("BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED", "RECONFIG_FAIL"), "failed"),
}
"""Every state of a job, by Slurm's name. Source: squeue(1), JOB STATE CODES."""
REASONS = {
    "TIMEOUT": "reached its time limit (site.time_limit)",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted by another job",
    "BOOT_FAIL": "its nodes did not boot",
    "DEADLINE": "could not end before its deadline",
}
SQUEUE_FIELDS = "JobArrayID:40|,State:20|,exit_code:12|,RestartCnt:8|,Reason:60"
SACCT_FIELDS = "JobID,State,ExitCode"
_WORST: tuple[Phase, ...] = ("running", "pending", "failed", "cancelled", "succeeded")
"""The phase of several jobs together is the first of these that any of them is in."""
_STARTED = re.compile(r"^(?:\S+Z )?trireme: job \d+, restart \d+, by (\w+): ", re.MULTILINE)
"""The line that each start of a job writes to its output, of earlier versions without the time."""
_ENDED = re.compile(
    r"^srun: error: (\S+): tasks? (\S+?): (Exited with exit code (\d+)|[A-Z][a-z ]+)", re.MULTILINE
)
_OUT_OF_MEMORY = re.compile(r"oom.kill event|: tasks? \S+: Out Of Memory", re.IGNORECASE)
"""What slurmstepd or srun says where a node's kernel ended tasks because their memory ran out."""
_COMPONENT = re.compile(r"^(?:\S+Z )?trireme: ranks from (\d+) on (\S+)$", re.MULTILINE)
"""The line of each component of a heterogeneous job, whose tasks srun numbers from 0."""
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Out Of Memory": signal.SIGKILL,
}


def read_squeue(text: str, jobs: Iterable[str]) -> dict[str, JobState]:
    """The states of those jobs that squeue lists, from its output in the format `SQUEUE_FIELDS`.

    The tasks of an array and the components of a heterogeneous job have lines of their own.

    >>> read_squeue("7|PENDING|0|1|BeginTime", ["7"])["7"].reason
    'requeued, restart 1 waits: BeginTime'
    """
    found = [
        (name, _restarted(_state(state, _exit_code(status), reason), int(restarts or 0)))
        for name, state, status, restarts, reason in rows(text, 5)
    ]
    return _by_job(found, jobs)


def read_sacct(text: str, jobs: Iterable[str]) -> dict[str, JobState]:
    """The states of those jobs that sacct lists, from its output in the format `SACCT_FIELDS`.

    A job that was requeued has a line for every start, the newest last.

    >>> read_sacct("7|NODE_FAIL|1:0\\n7|CANCELLED by 1000|0:15", ["7"])["7"].phase
    'cancelled'
    """
    newest = {}
    for name, state, code in rows(text, 3):
        if state.split(" ")[0] in PHASES:
            newest[name] = _state(state.split(" ")[0], code, "")
    return _by_job(newest.items(), jobs)


def from_record(text: str, job: str) -> JobState | None:
    """The state in the end record of a job; None where it is invalid, or of another job."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if record.get("job") != job:
        return None
    return _state("FAILED" if record["exit_code"] else "COMPLETED", f"{record['exit_code']}:0", "")


def rank_ends(output: str) -> list[RankEnd]:
    """The ranks that ended badly by srun's messages, in their order, but those last that srun ended because
    of another one.

    >>> [end.rank for end in rank_ends("srun: error: node1: tasks 2-3: Exited with exit code 17")]
    [2, 3]
    """
    memory = ": memory ran out, as Slurm has seen" if _OUT_OF_MEMORY.search(output) else ""
    components = [(int(first), set(expand(hosts))) for first, hosts in _COMPONENT.findall(output)]
    ended = []
    for nodes, tasks, how, code in _ENDED.findall(output):
        status = int(code) if code else -_SIGNALS.get(how.strip(), signal.SIGKILL)
        firsts = (
            [first for first, hosts in components if hosts.intersection(expand(nodes))] if components else [0]
        )
        if len(firsts) == 1:  # components that share a node are ambiguous
            reason = ending(status) + (memory if status == -signal.SIGKILL else "")
            for task in expand(f"[{tasks.strip('[]')}]"):
                ended.append(RankEnd(rank=firsts[0] + int(task), exit_code=status, reason=reason))
    return sorted(ended, key=lambda end: end.exit_code in SECONDARY_EXIT_CODES)


def with_end(state: JobState, run_dir: str) -> JobState:
    """A failed state with the outcome of the last start: that it has saved, that its nodes are unfit, or
    the rank that failed first."""
    log, note = Path(run_dir) / EXECUTOR_LOG, Path(run_dir) / STOP_NOTE
    if state.phase != "failed" or not log.is_file():
        return state
    if note.is_file():
        step = json.loads(note.read_text(encoding="utf-8"))["step"]
        reason = f"interrupted, saved after step {step}: trireme submit --resume resumes it"
        return replace(state, reason=reason)
    if (unfit := Path(run_dir, NODE_NOTE)).is_file():
        return replace(state, reason=unfit.read_text(encoding="utf-8", errors="replace").strip())
    output = log.read_text(encoding="utf-8", errors="replace")
    *_, starter, newest = ["", *_STARTED.split(output)]
    if starter == "torchrun":
        return torchrun_state(newest, state.exit_code or 1)
    ends = rank_ends(newest)
    if not ends:
        is_late = (Path(run_dir) / "exit" / "late").is_file()
        late = " before its ranks had saved (executor.save_lead_s)"
        return replace(state, reason=f"{state.reason}{late}") if is_late else state
    return failed_by(ends)


def _state(name: str, exit_code: str, reason: str) -> JobState:
    phase = PHASES.get(name, "running")  # a state of a newer Slurm: the job still exists
    if phase == "pending":
        return JobState(phase=phase, reason=f"waits: {reason}" if reason not in ("", "None") else "waits")
    if phase == "running":
        return JobState(phase=phase, reason="" if name == "RUNNING" else name.lower())
    code, _, number = exit_code.partition(":")
    status = -int(number) if number not in ("", "0") else int(code or 0)
    if phase == "succeeded":
        return JobState(phase=phase, exit_code=0)
    return JobState(phase=phase, exit_code=status, reason=REASONS.get(name, f"Slurm says {name}"))


def _restarted(state: JobState, num_restarts: int) -> JobState:
    if not num_restarts or state.phase not in ("pending", "running"):
        return state
    restart = f"restart {num_restarts}"
    is_running = state.phase == "running"
    return replace(state, reason=restart if is_running else f"requeued, {restart} {state.reason}")


def _by_job(states: Iterable[tuple[str, JobState]], jobs: Iterable[str]) -> dict[str, JobState]:
    """The state of each job, from those of its tasks and components: ``7``, ``7_3``, ``7+1``."""
    found: dict[str, list[JobState]] = {}
    for name, state in states:
        for job in {name, re.split(r"[+_]", name)[0]}:
            found.setdefault(job, []).append(state)
    return {job: min(found[job], key=lambda state: _WORST.index(state.phase)) for job in jobs if job in found}


def _exit_code(status: str) -> str:
    """Exit code and signal as sacct writes them, from squeue's status of wait(2).

    >>> _exit_code("4352"), _exit_code("9"), _exit_code("17:0")
    ('17:0', '0:9', '17:0')
    """
    if not status.isdecimal():
        return status
    return f"{int(status) >> 8}:{int(status) & 0x7F}"
