"""Why a job failed: the rank that failed first, and its error."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.base.errors import PeerError
from launcher.base.files import read_json
from launcher.contract.heartbeat import stacks_name
from launcher.contract.job import (
    EXECUTOR_LOG,
    EXIT,
    OUT_OF_MEMORY,
    SECONDARY_EXIT_CODES,
    JobState,
    RankEnd,
    error_name,
    log_name,
    of_start,
)
from launcher.runs.hang import Hang, find_hang, with_hang
from launcher.runs.store import is_trained
from launcher.typed.read import Reading, read

_TAIL_LINES = 15
_MAX_RANKS = 8
_OF_PEERS = ("DistBackendError", "DistNetworkError", "DistStoreError", PeerError.__name__)
"""The types of torch's errors of NCCL, and of the store in which ranks meet; and our own."""
_PEER_GONE = re.compile("gloo/transport|(closed|reset) by peer")
"""In the messages of gloo's errors."""


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

    @property
    def is_consequence(self) -> bool:
        """Whether a message to another rank failed, which had ended, and nothing of this rank itself."""
        return self.error_type in _OF_PEERS or (
            self.error_type == "RuntimeError" and _PEER_GONE.search(self.message) is not None
        )

    @property
    def line(self) -> str:
        """The rank and its error, as one line."""
        line, *_ = (*self.message.splitlines(), "")
        return (
            f"rank {self.rank}: {self.error_type}: {line}" if self.traceback else f"rank {self.rank}: {line}"
        )


def rank_failures(run_dir: Path, start: str = EXIT) -> tuple[RankFailure, ...]:
    """The errors of all ranks of a start that reported one, the earliest first; ``start``: its folder."""
    names = of_start(error_name(0).replace("0", "*"), start)
    found = [read_json(path) for path in run_dir.glob(names)]
    failures = [failure for report in found if (failure := read(RankFailure, report, Reading()))]
    return tuple(sorted(failures, key=lambda failure: (failure.time, failure.rank)))


def out_of_memory_ranks(run_dir: Path) -> tuple[int, ...]:
    """The ranks that ran out of memory."""
    failures = rank_failures(run_dir)
    return tuple(sorted(failure.rank for failure in failures if failure.error_type == OUT_OF_MEMORY))


def with_cause(state: JobState, run_dir: Path) -> JobState:
    """A failed state with the rank that is the cause, if it is known: the executor knows which ranks have
    ended and how, but those that waited for the one that failed end as well, and may be told of before it."""
    hung = with_hang(state, run_dir)
    if hung is not state or state.phase != "failed":
        return hung
    failures = rank_failures(run_dir)
    if (cause := _cause(state, failures)) is not None:
        code = next((end.exit_code for end in state.ends if end.rank == cause.rank), 1)
        return replace(state, rank=cause.rank, exit_code=code, reason=f"ended with exit code {code}")
    if (end := next(iter(_unexplained(state, failures)), None)) is not None:
        return replace(state, rank=end.rank, exit_code=end.exit_code, reason=end.reason)
    return state


def unless_trained(state: JobState, run_dir: Path) -> JobState:
    """A failed state; of a run that has saved its last step that of a finished one, where no rank has failed
    itself: the signal came when nothing was left to do but to end."""
    if state.phase != "failed" or not is_trained(run_dir):
        return state
    failures = rank_failures(run_dir)
    own = [failure for failure in failures if not failure.is_consequence]
    is_by_signal = all(end.exit_code < 0 for end in _unexplained(state, failures))
    return JobState(phase="succeeded", exit_code=0) if is_by_signal and not own else state


def _cause(state: JobState, failures: Sequence[RankFailure]) -> RankFailure | None:
    """The report of the rank that is the cause; None where that left none, as one that was killed.

    An error of its own comes before the end of a rank without a report, and that before an error of a message
    to another rank.
    """
    own = [failure for failure in failures if not failure.is_consequence]
    return next(iter(own or ([] if _unexplained(state, failures) else failures)), None)


def _unexplained(state: JobState, failures: Sequence[RankFailure]) -> list[RankEnd]:
    """The ranks that ended neither with a report nor because others had, by what the executor knows."""
    ends = state.ends
    if not ends and state.rank is not None and state.exit_code is not None:
        ends = (RankEnd(rank=state.rank, exit_code=state.exit_code, reason=state.reason),)
    reported = {failure.rank for failure in failures}
    return [end for end in ends if end.rank not in reported and end.exit_code not in SECONDARY_EXIT_CODES]


def failure_text(run_dir: Path, state: JobState) -> str:
    """The rank that failed first, its traceback or the end of its log, and where its log is."""
    if (hang := find_hang(run_dir)) is not None:
        return _hang_text(run_dir, hang)
    failures = rank_failures(run_dir)
    if (first := _cause(state, failures)) is None:
        return _text_without_error(run_dir, state, failures)
    rest = [failure for failure in failures if failure is not first]
    kind = f"{first.error_type}: " if first.traceback else ""
    lines = [f"rank {first.rank} failed: {kind}{first.message}"]
    if first.traceback:
        lines += ["", first.traceback.rstrip(), ""]
    lines += _others(rest)
    return "\n".join([*lines, f"Its log: {run_dir / log_name(first.rank)}"])


def failure_line(run_dir: Path, state: JobState, start: str = EXIT) -> str:
    """The rank that failed first and its error, as one line; ``start``: the folder of the start that did."""
    if (hang := find_hang(run_dir, start)) is not None:
        return f"rank {hang.rank} {hang}"
    if (first := _cause(state, rank_failures(run_dir, start))) is not None:
        return first.line
    return state.reason if state.rank is None else f"rank {state.rank} {state.reason}"


def _hang_text(run_dir: Path, hang: Hang) -> str:
    lines = [f"rank {hang.rank} {hang}"]
    if hang.stack:
        lines += ["", "Where it was, the innermost call first:", hang.stack, ""]
        lines.append(f"All its threads: {run_dir / stacks_name(hang.rank)}")
    if hang.waiting:
        lines.append(f"Waiting for other ranks then: {_ranks(hang.waiting)}.")
    return "\n".join([*lines, f"Its log: {run_dir / log_name(hang.rank)}"])


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
