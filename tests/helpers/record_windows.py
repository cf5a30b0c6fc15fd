"""Records as ranks write them in a long run: sums by window, from whole steps that a test has made."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.contract.job import records_name
from launcher.contract.records import COLLECTIVE_KINDS, COMPUTE, Header, StepRecord
from launcher.metrics.blocked_time import groups, shortest_calls_ns
from launcher.runtime.measure.fold import fold
from launcher.runtime.measure.records import RecordWriter
from tests.helpers.fake_runs import FakeRun
from tests.helpers.objects import inside

Steps = Sequence[Sequence[StepRecord]]
"""Step by step, the records of all ranks."""


def varied_steps(run: FakeRun, seed: int = 0) -> tuple[list[Header], list[list[StepRecord]]]:
    """The headers and, step by step, the records of all ranks of a run whose every time is another."""
    source = random.Random(seed)
    ranks = [run.records(rank) for rank in range(run.mesh.num_ranks)]
    headers = [inside(records[0]) for records in ranks]
    steps: list[list[StepRecord]] = []
    begins = [0] * len(ranks)
    for step in range(run.num_steps):
        rows = []
        for rank, records in enumerate(ranks):
            row = _varied(inside(records[1 + step]), source, begins[rank])
            begins[rank] += row.duration_ns + source.randrange(10)
            rows.append(row)
        steps.append(rows)
    return headers, steps


def _varied(row: StepRecord, source: random.Random, start_ns: int) -> StepRecord:
    def times(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(1, 10**6) for _ in range(count))

    calls = {kind: times(len(each)) for kind, each in row.collectives_ns.items()}
    kinds = dict(zip(row.kinds_ns, times(len(row.kinds_ns)), strict=True))
    kinds |= {kind: sum(each) for kind, each in calls.items()}
    compute = times(len(row.compute_ns))
    kinds[COMPUTE] = sum(compute)
    return replace(
        row,
        start_ns=start_ns,
        duration_ns=sum(kinds.values()),
        kinds_ns=kinds,
        collectives_ns=calls,
        compute_ns=compute,
        is_skipped=source.random() < 0.3,
    )


def write_windows(
    run_dir: Path,
    headers: Sequence[Header],
    steps: Steps,
    window: int,
    warmup: int = 0,
) -> None:
    """Appends a start of all ranks, with sums of every ``window`` steps."""
    writers = [RecordWriter(run_dir, header) for header in headers]
    since = 0
    for number, rows in enumerate(steps, 1):
        for writer, row in zip(writers, rows, strict=True):
            writer.write(row, until_window=True)
        if (rows[0].step + 1) % window == 0:
            end_window(writers, headers, steps[since:number], steps[0][0].step + warmup)
            since = number
    for writer in writers:
        writer.close()


def end_window(
    writers: Iterable[RecordWriter],
    headers: Sequence[Header],
    steps: Steps,
    measured: int,
) -> None:
    """Writes the sums of some steps, apart for those before step ``measured``."""
    parts = [
        [rows for rows in steps if (rows[0].step < measured) == is_warmup] for is_warmup in (True, False)
    ]
    shortest = [_shortest(headers, part) for part in parts]
    for index, (writer, header) in enumerate(zip(writers, headers, strict=True)):
        windows = [
            fold([rows[index] for rows in part], least[index], header.p2p_latency_ns)
            for part, least in zip(parts, shortest, strict=True)
            if part
        ]
        writer.end_window(windows, steps[-1][0].step)


def _shortest(headers: Sequence[Header], steps: Steps) -> list[dict[str, int | None]]:
    """For each rank, what its group's members have in common."""
    found: list[dict[str, int | None]] = [dict.fromkeys(COLLECTIVE_KINDS, 0) for _ in headers]
    for kind in COLLECTIVE_KINDS:
        for indices in groups(headers, kind):
            calls = (shortest_calls_ns(headers, [rows[i] for i in indices], kind, indices) for rows in steps)
            total = sum(map(sum, calls))
            for index in indices:
                found[index][kind] = total
    return found


def files_of(run_dir: Path, rank: int = 0) -> tuple[Path, Path, list[Path]]:
    """The steps since the last window, the sums, and the whole steps of earlier windows."""
    current = run_dir / records_name(rank)
    whole = sorted((current.parent / "whole").glob(f"{current.stem}-*"))
    return current, current.parent / "sums" / current.name, whole
