"""Reads the records of all ranks of one run, strictly: a record that contradicts itself is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from launcher.base.errors import LauncherError
from launcher.contract.records import EvalRecord, Part, RunRecords, WindowRecord
from launcher.metrics.rank_files import TRAINER, RankFiles, rank_files


def read_run(run_dir: Path) -> RunRecords:
    """The records in ``run_dir/metrics``.

    A resumed run counts from its newest start that made a step: earlier starts ran in other processes, and
    some of their steps were made again.

    Raises:
        LauncherError: no records, a broken line (with file and line), another version, a missing rank.
    """
    files = rank_files(run_dir)
    if not files:
        raise LauncherError(
            f"{run_dir} holds no metrics/rank-*.jsonl. Give the directory of a run that started."
        )
    _leave_out_empty_start(files)
    _check_ranks(files)
    trainers = [file for file in files if file.header.role == TRAINER]
    made = [file.start.num_steps for file in trainers]
    windows = _common_windows(trainers)
    _leave_whole_steps(trainers, windows)
    complete = sorted(set.intersection(*(set(file.start.steps) for file in trainers)))
    steps = {step: tuple(file.start.steps[step] for file in trainers) for step in complete}
    records = RunRecords(
        headers=tuple(file.header for file in trainers),
        steps=steps,
        windows=windows,
        evals=_merge_evals(files),
        num_torn_lines=sum(file.num_torn_lines for file in files),
        num_incomplete_steps=max(made) - len(complete) - sum(rows[0].num_steps for rows in windows),
        num_starts=max(max(file.starts) for file in files),
        num_lost_steps=max(file.num_lost_steps for file in trainers),
        memory={file.header.rank: file.start.memory for file in trainers if file.start.memory},
        roles={file.header.rank: tuple(file.start.of_role) for file in files if file.start.of_role},
        newest=tuple(_newest(trainers)),
    )
    for rows in records.parts:
        _check_agreement(trainers, rows)
    return records


def _leave_out_empty_start(files: Sequence[RankFiles]) -> None:
    """Goes back to the start before one in which no rank made a step: it hides nothing of what was made.

    A rank that ended before it wrote a header has one start less, and is there already.
    """
    trainers = [file for file in files if file.header.role == TRAINER]
    newest = max((file.chosen for file in trainers), default=0)
    if any(file.start.last_step >= 0 for file in trainers if file.chosen == newest):
        return
    for file in files:
        file.leave_out_empty_start()


def _common_windows(trainers: Sequence[RankFiles]) -> tuple[tuple[WindowRecord, ...], ...]:
    """The windows that every rank has."""
    each = [file.start.windows for file in trainers]
    rows = (tuple(windows[end] for windows in each) for end in sorted(set.intersection(*map(set, each))))
    return tuple(row for row in rows if len({window.first_step for window in row}) == 1)


def _leave_whole_steps(trainers: Sequence[RankFiles], windows: Sequence[Sequence[WindowRecord]]) -> None:
    """Leaves every rank with its steps after the windows of all ranks.

    A rank that was killed has no sums of a window that others have, but its steps: those of the others are
    kept whole beside their sums.
    """
    end = windows[-1][0].step if windows else -1
    needed = {step for file in trainers for step in file.start.steps if step > end}
    for file in trainers:
        for window in file.start.windows.values():
            if window.step > end and not needed.isdisjoint(range(window.first_step, window.step + 1)):
                file.start.steps |= file.whole_steps(window)
        file.start.steps = {step: row for step, row in file.start.steps.items() if step > end}


def _newest(trainers: Sequence[RankFiles]) -> list[Part]:
    """What ends with the newest step of any rank, of every rank that has made it."""
    newest = max(file.start.last_step for file in trainers)
    found = (file.start.steps.get(newest) or file.start.windows.get(newest) for file in trainers)
    return [part for part in found if part is not None]


def _check_ranks(files: Sequence[RankFiles]) -> None:
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
    begins = {first: file for file in trainers if (first := file.start.first_step) is not None}
    if len(begins) > 1:
        found = ", ".join(f"rank {file.header.rank} at step {step}" for step, file in sorted(begins.items()))
        raise LauncherError(f"{folder}: the records are of different starts: {found}. Resume the run again.")


def _check_agreement(trainers: Sequence[RankFiles], rows: Sequence[Part]) -> None:
    """All ranks saw the same global batch."""
    first = rows[0]
    for file, other in zip(trainers, rows, strict=True):
        if (other.num_tokens, other.num_samples) != (first.num_tokens, first.num_samples):
            found, where = (
                f"{other.num_tokens} tokens in {other.num_samples} samples",
                trainers[0].header.rank,
            )
            raise LauncherError(
                f"{file.path}: step {other.step} has {found}, "
                f"on rank {where} {first.num_tokens} in {first.num_samples}"
            )


def _merge_evals(files: Sequence[RankFiles]) -> tuple[EvalRecord, ...]:
    """One for each step, of the first rank that has it."""
    merged = {step: record for file in reversed(files) for step, record in file.evals.items()}
    return tuple(merged[step] for step in sorted(merged))
