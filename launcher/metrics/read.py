"""Reads the records of all ranks of one run, strictly: a record that contradicts itself is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.base.errors import ConfigError, LauncherError
from launcher.base.files import json_object, read_regular
from launcher.contract.records import (
    COLLECTIVE_KINDS,
    RANK_KINDS,
    VERSION,
    EvalRecord,
    Header,
    MemoryRecord,
    RoleRecord,
    RunRecords,
    StepRecord,
)
from launcher.typed.read import read_or_raise

_Later = StepRecord | EvalRecord | MemoryRecord | RoleRecord
_KINDS: Mapping[Any, type[StepRecord | EvalRecord | MemoryRecord]] = {
    "step": StepRecord,
    "eval": EvalRecord,
    "memory": MemoryRecord,
}
"""What follows the header of a rank that trains, by ``type``."""
TRAINER = "trainer"
"""Role of the ranks that hold the model and make steps."""


def read_run(run_dir: Path) -> RunRecords:
    """The records in ``run_dir/metrics``.

    A resumed run counts from its newest start that made a step: earlier starts ran in other processes, and
    some of their steps were made again.

    Raises:
        LauncherError: no records, a broken line (with file and line), another version, a missing rank.
    """
    paths = sorted((run_dir / "metrics").glob("rank-*.jsonl"))
    if not paths:
        raise LauncherError(
            f"{run_dir} holds no metrics/rank-*.jsonl. Give the directory of a run that started."
        )
    files = sorted((_read_file(path) for path in paths), key=lambda file: file.header.rank)
    _leave_out_empty_start(files)
    _check_ranks(files)
    trainers = [file for file in files if file.header.role == TRAINER]
    seen = [set(file.steps) for file in trainers]
    complete = sorted(set.intersection(*seen))
    for step in complete:
        _check_agreement(trainers, step)
    newest = max(set.union(*seen), default=-1)
    return RunRecords(
        headers=tuple(file.header for file in trainers),
        steps={step: tuple(file.steps[step] for file in trainers) for step in complete},
        evals=_merge_evals(files),
        num_torn_lines=sum(file.num_torn_lines for file in files),
        num_incomplete_steps=len(set.union(*seen)) - len(complete),
        num_starts=max(file.num_starts for file in files),
        num_lost_steps=max(file.num_lost_steps for file in trainers),
        memory={file.header.rank: file.memory for file in trainers if file.memory},
        roles={file.header.rank: tuple(file.of_role) for file in files if file.of_role},
        newest=tuple(file.steps[newest] for file in trainers if newest in file.steps),
    )


def _leave_out_empty_start(files: Sequence[_RankFile]) -> None:
    """Goes back to the start before one in which no rank made a step: it hides nothing of what was made.

    A rank that ended before it wrote a header has one start less, and is there already.
    """
    trainers = [file for file in files if file.header.role == TRAINER]
    newest = max((file.num_starts for file in trainers), default=0)
    if any(file.steps for file in trainers if file.num_starts == newest):
        return
    for file in files:
        if file.before is not None and not file.steps:
            file.header, file.steps, file.memory, file.of_role = file.before


@dataclass(kw_only=True)
class _RankFile:
    """One rank's file while it is read."""

    path: Path
    header: Header
    steps: dict[int, StepRecord] = field(default_factory=dict)
    evals: dict[int, EvalRecord] = field(default_factory=dict)
    memory: MemoryRecord | None = None
    of_role: list[RoleRecord] = field(default_factory=list)
    num_starts: int = 1
    before: tuple[Header, dict[int, StepRecord], MemoryRecord | None, list[RoleRecord]] | None = None
    """What the newest start has taken the place of: the last one before it that recorded something."""
    num_torn_lines: int = 0
    made: set[int] = field(default_factory=set)
    """Steps of all starts that are behind the newest state of the training."""
    num_lost_steps: int = 0

    def begin(self, header: Header) -> None:
        """Takes in a later start."""
        if self.steps or self.of_role:
            self.before = (self.header, self.steps, self.memory, self.of_role)
        self.header, self.steps, self.num_starts = header, {}, self.num_starts + 1
        self.memory, self.of_role = None, []

    def add(self, record: StepRecord) -> None:
        """Takes in a step; the first of a start tells how far back the start went."""
        if not self.steps:
            lost = {step for step in self.made if step >= record.step}
            self.num_lost_steps += len(lost)
            self.made -= lost
        self.steps[record.step] = record
        self.made.add(record.step)


def _read_file(path: Path) -> _RankFile:
    records, num_torn_lines = _lines(path)
    file: _RankFile | None = None
    for number, values in records:
        if values.get("type") == "header":
            header = _header(path, number, values)
            if file is None:
                file = _RankFile(path=path, header=header, num_torn_lines=num_torn_lines)
            else:
                file.begin(header)
        elif file is None:
            raise _broken(path, number, "the first record must be the header")
        else:
            _add(file, number, values)
    if file is None:
        raise _broken(path, 1, "no header: the rank ended before it had written one")
    return file


def _lines(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """The records with their line numbers, and how many lines were left half written.

    A killed rank leaves half a line at the end of its file; when the rank is started again, a
    header follows it. A broken line anywhere else is damage.
    """
    try:
        lines = read_regular(path).split(b"\n")
    except OSError as error:
        raise LauncherError(f"{path} cannot be read: {error}") from error
    parsed = [json_object(line) for line in lines]
    records: list[tuple[int, dict[str, Any]]] = []
    num_torn_lines = 0
    for number, values in enumerate(parsed, 1):
        if values is not None:
            records.append((number, values))
        elif number == len(lines):
            num_torn_lines += lines[-1] != b""
        elif (parsed[number] or {}).get("type") == "header":
            num_torn_lines += 1
        else:
            raise _broken(path, number, "not a JSON object")
    return records, num_torn_lines


def _broken(path: Path, number: int, problem: str) -> LauncherError:
    return LauncherError(f"{path}:{number}: {problem}")


def _header(path: Path, number: int, values: dict[str, Any]) -> Header:
    if values.get("version") != VERSION:
        raise _broken(
            path, number, f"records of version {values.get('version')}, this launcher reads {VERSION}"
        )
    try:
        return read_or_raise(Header, values)
    except ConfigError as error:
        raise _broken(path, number, str(error)) from error


def _add(file: _RankFile, number: int, values: dict[str, Any]) -> None:
    """Adds a later record. Checked by hand: there are too many for the typed reader."""
    kind = _KINDS.get(values.get("type"))
    record: _Later
    if kind is None and file.header.role != TRAINER:
        record = RoleRecord(type=str(values.pop("type", None)), values=values)
    elif kind is None:
        known = ", ".join(("header", *_KINDS))
        raise _broken(file.path, number, f"type {values.get('type')!r} is none of {known}")
    else:
        try:
            record = kind(**values)
        except TypeError as error:
            raise _broken(file.path, number, str(error)) from error
    if problem := _problem(record):
        raise _broken(file.path, number, problem)
    if isinstance(record, EvalRecord):
        file.evals[record.step] = record
    elif isinstance(record, MemoryRecord):
        file.memory = record
    elif isinstance(record, RoleRecord):
        file.of_role.append(record)
    elif record.step in file.steps:
        raise _broken(file.path, number, f"step {record.step} is recorded twice in one start")
    else:
        file.add(record)


def _problem(record: _Later) -> str:
    if isinstance(record, StepRecord):
        return step_problem(record)
    return _eval_problem(record) if isinstance(record, EvalRecord) else _counts_problem(record)


def _counts_problem(record: MemoryRecord | RoleRecord) -> str:
    fields = record.values if isinstance(record, RoleRecord) else vars(record)
    values = {key: value for key, value in fields.items() if key != "type" and value is not None}
    is_whole = _are_counts(values.values())
    return "" if is_whole else f"{record.type}: {', '.join(values)} must be whole numbers of at least 0"


def step_problem(record: StepRecord) -> str:
    """What is wrong with one step by itself; empty when nothing is.

    The kinds must sum to the duration, and the calls of every collective to their kind.
    """
    times = (record.start_ns, record.duration_ns, record.first_backward_ns or 0)
    if not _are_counts((record.step, *times, record.num_receives, record.num_tokens, record.num_samples)):
        return f"step {record.step}: times and counts must be whole numbers of at least 0"
    if not record.num_tokens or not record.num_samples:
        return f"step {record.step}: a step trains at least 1 token of 1 sample"
    if not all(map(_is_number, (record.loss, record.grad_norm, record.lr))):
        return f"step {record.step}: loss, grad_norm and lr must be numbers or null"
    return _times_problem(record)


def _times_problem(record: StepRecord) -> str:
    kinds, calls = record.kinds_ns, record.collectives_ns
    if not isinstance(kinds, Mapping) or not isinstance(calls, Mapping) or not _are_counts(record.compute_ns):
        return f"step {record.step}: kinds_ns, collectives_ns and compute_ns hold times"
    for name in (*kinds.keys() - set(RANK_KINDS), *calls.keys() - set(COLLECTIVE_KINDS)):
        return f"step {record.step}: {name!r} is not a kind of time"
    if not _are_counts(kinds.values()) or not all(map(_are_counts, calls.values())):
        return f"step {record.step}: times must be whole numbers of at least 0"
    total = sum(kinds.values())
    if total != record.duration_ns:
        return f"step {record.step}: the kinds sum to {total} ns, but the step took {record.duration_ns} ns"
    for axis in COLLECTIVE_KINDS:
        blocked, parts = kinds.get(axis, 0), sum(calls.get(axis, ()))
        if blocked != parts:
            return f"step {record.step}: the {axis} calls sum to {parts} ns, but {axis} took {blocked} ns"
    return ""


def _eval_problem(record: EvalRecord) -> str:
    if _are_counts((record.step, record.num_tokens)) and record.loss is not None and _is_number(record.loss):
        return ""
    return f"evaluation at step {record.step}: step and num_tokens must be whole numbers, loss a number"


def _are_counts(values: Any) -> bool:
    if not isinstance(values, Iterable) or isinstance(values, str):
        return False
    numbers = list(values)
    return set(map(type, numbers)) <= {int} and min(numbers, default=0) >= 0


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (int, float)


def _check_ranks(files: Sequence[_RankFile]) -> None:
    """Every rank has one file, the trainer ranks fill a mesh, and all of them are of one start."""
    folder = files[0].path.parent
    for rank, file in enumerate(files):
        if file.header.rank != rank:
            raise LauncherError(f"{folder}: no records of rank {rank}, but of rank {files[-1].header.rank}")
    trainers = [file for file in files if file.header.role == TRAINER]
    if not trainers:
        raise LauncherError(f"{folder}: no records of a trainer rank")
    coordinates = {(file.header.pp_rank, file.header.dp_rank, file.header.tp_rank) for file in trainers}
    mesh_size = math.prod(len(set(axis)) for axis in zip(*coordinates, strict=True))
    if not len(trainers) == len(coordinates) == mesh_size:
        raise LauncherError(f"{folder}: the coordinates of the {len(trainers)} trainer ranks fill no mesh")
    begins = {min(file.steps): file for file in trainers if file.steps}
    if len(begins) > 1:
        found = ", ".join(f"rank {file.header.rank} at step {step}" for step, file in sorted(begins.items()))
        raise LauncherError(f"{folder}: the records are of different starts: {found}. Resume the run again.")


def _check_agreement(trainers: Sequence[_RankFile], step: int) -> None:
    """All ranks saw the same global batch."""
    first = trainers[0].steps[step]
    for file in trainers[1:]:
        other = file.steps[step]
        if (other.num_tokens, other.num_samples) != (first.num_tokens, first.num_samples):
            raise LauncherError(
                f"{file.path}: step {step} has {other.num_tokens} tokens in {other.num_samples} samples, "
                f"on rank {trainers[0].header.rank} {first.num_tokens} in {first.num_samples}"
            )


def _merge_evals(files: Sequence[_RankFile]) -> tuple[EvalRecord, ...]:
    """One for each step, of the first rank that has it."""
    merged = {step: record for file in reversed(files) for step, record in file.evals.items()}
    return tuple(merged[step] for step in sorted(merged))
