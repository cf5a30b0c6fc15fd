"""Why a job failed: the rank that failed first, and its error."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.files import read_json
from launcher.contract.heartbeat import stacks_name
from launcher.contract.job import (
    EXECUTOR_LOG,
    OUT_OF_MEMORY,
    SECONDARY_EXIT_CODES,
    JobState,
    error_name,
    log_name,
)
from launcher.runs.hang import Hang, find_hang
from launcher.typed.read import Reading, read

_TAIL_LINES = 15
_MAX_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The error of a rank, from ``exit/rank-N.json``."""

    rank: int
    time: float
    """`launcher.base.timestamps.steady_time` of the rank."""
    error_type: str
    message: str
    traceback: str
    """Empty for an error that its message explains."""


def rank_failures(run_dir: Path) -> tuple[RankFailure, ...]:
    """The errors of all ranks that reported one, the earliest first."""
    found = [read_json(path) for path in run_dir.glob(error_name(0).replace("0", "*"))]
    failures = [failure for report in found if (failure := read(RankFailure, report, Reading()))]
    return tuple(sorted(failures, key=lambda failure: (failure.time, failure.rank)))


def out_of_memory_ranks(run_dir: Path) -> tuple[int, ...]:
    """The ranks that ran out of memory."""
    failures = rank_failures(run_dir)
    return tuple(sorted(failure.rank for failure in failures if failure.error_type == OUT_OF_MEMORY))


def failure_text(run_dir: Path, state: JobState) -> str:
    """The rank that failed first, its traceback or the end of its log, and where its log is."""
    if (hang := find_hang(run_dir)) is not None:
        return _hang_text(run_dir, hang)
    failures = rank_failures(run_dir)
    if not failures or _was_killed(state, failures):
        return _text_without_error(run_dir, state, failures)
    first, *rest = failures
    kind = f"{first.error_type}: " if first.traceback else ""
    lines = [f"rank {first.rank} failed: {kind}{first.message}"]
    if first.traceback:
        lines += ["", first.traceback.rstrip(), ""]
    lines += _others(rest)
    return "\n".join([*lines, f"Its log: {run_dir / log_name(first.rank)}"])


def failure_line(run_dir: Path, state: JobState) -> str:
    """The rank that failed first and its error, as one line."""
    if (hang := find_hang(run_dir)) is not None:
        return f"rank {hang.rank} {hang}"
    failures = rank_failures(run_dir)
    if failures and not _was_killed(state, failures):
        first, (line, *_) = failures[0], (*failures[0].message.splitlines(), "")
        kind = f"{first.error_type}: " if first.traceback else ""
        return f"rank {first.rank}: {kind}{line}"
    return state.reason if state.rank is None else f"rank {state.rank} {state.reason}"


def _hang_text(run_dir: Path, hang: Hang) -> str:
    lines = [f"rank {hang.rank} {hang}"]
    if hang.stack:
        lines += ["", "Where it was, the innermost call first:", hang.stack, ""]
        lines.append(f"All its threads: {run_dir / stacks_name(hang.rank)}")
    if hang.waiting:
        lines.append(f"Waiting for other ranks then: {_ranks(hang.waiting)}.")
    return "\n".join([*lines, f"Its log: {run_dir / log_name(hang.rank)}"])


def _was_killed(state: JobState, failures: Sequence[RankFailure]) -> bool:
    """Whether a rank was killed without a report: the ranks with a report then failed because of it."""
    if state.rank is None or state.exit_code is None or state.exit_code in SECONDARY_EXIT_CODES:
        return False
    return state.exit_code < 0 and state.rank not in {failure.rank for failure in failures}


def _text_without_error(run_dir: Path, state: JobState, failures: Sequence[RankFailure]) -> str:
    if state.rank is None:
        log = run_dir / EXECUTOR_LOG
        return "\n".join([f"the job failed: {state.reason}", *_tail(log), f"Its log: {log}"])
    log = run_dir / log_name(state.rank)
    log = log if log.is_file() else run_dir / EXECUTOR_LOG
    lines = [f"rank {state.rank} failed: {state.reason}"]
    if state.exit_code == -signal.SIGKILL:
        lines.append("The kernel does this when memory runs out (see dmesg); so does kill -9.")
    lines += _tail(log) + _others(failures)
    return "\n".join([*lines, f"Its log: {log}"])


def _others(failures: Sequence[RankFailure]) -> list[str]:
    return [f"After it failed: {_ranks([failure.rank for failure in failures])}."] if failures else []


def _ranks(ranks: Sequence[int]) -> str:
    named = [f"rank {rank}" for rank in ranks[:_MAX_RANKS]]
    return ", ".join([*named, *([f"{len(ranks) - _MAX_RANKS} more"] if len(ranks) > _MAX_RANKS else [])])


def _tail(log: Path) -> list[str]:
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return ["", *(f"  {line}" for line in lines[-_TAIL_LINES:]), ""] if lines else []
