"""Records of long runs: sums by window in place of steps, and the report that reads them."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import LauncherError
from launcher.contract.mesh import Mesh
from launcher.contract.records import KEPT_WINDOWS, WINDOW_STEPS, Header
from launcher.metrics import rank_files
from launcher.metrics.blocked_time import split, waited_ns
from launcher.metrics.read import read_run
from launcher.report.bubble import bubble
from launcher.report.notes import gap_fraction, run_notes
from launcher.report.runs import Run, load_run
from launcher.report.speedup import compare, to_json
from launcher.report.tables import report_text
from launcher.runtime.measure.records import RecordWriter
from launcher.typed.read import plain
from tests.bench.month_of_records import write_month
from tests.helpers.fake_runs import FakeRun
from tests.helpers.record_windows import end_window, files_of, varied_steps, write_windows
from tests.helpers.run_folders import make_folders

WINDOW = 5
KINDS = {"compute": 9, "replicated": 2, "pipeline": 3, "tp": 1, "dp": 2, "model": 1, "other": 1}
CALLS = {"tp": (1, 1, 1), "dp": (1, 1), "model": (1,)}
RUN = FakeRun(
    mesh=Mesh(pp=2, dp=2, tp=2),
    kinds_ms=dict.fromkeys(range(8), KINDS),
    calls_ms=dict.fromkeys(range(8), CALLS),
    num_steps=23,
    warmup_steps=2,
    header={"p2p_latency_ns": 100_000},
    first_backward_ms=dict.fromkeys(range(8), 3),
)
"""Steps 0 and 1 are warm-up; windows of 5 end before 5, 10, 15 and 20."""
SINGLE = replace(RUN, mesh=Mesh(pp=1, dp=1, tp=1))


def written(path: Path, run: FakeRun, window: int, steps: slice = slice(None)) -> Path:
    """A run directory with varied times, by window; ``window`` beyond the steps: all of them whole."""
    headers, rows = varied_steps(run)
    run.write(path)
    for rank in range(run.mesh.num_ranks):
        files_of(path, rank)[0].unlink()
    write_windows(path, headers, rows[steps], window, run.warmup_steps)
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same steps in sums, and whole."""
    folder = tmp_path_factory.mktemp("runs")
    return written(folder / "sums" / "run", RUN, WINDOW), written(folder / "whole" / "run", RUN, 1000)


def exact(run: Run) -> dict[str, Any]:
    """Every figure of the report that is a sum or a mean of steps."""
    headers = run.records.headers
    found = bubble(run)
    assert found is not None
    return {
        "work": run.work,
        "gap": gap_fraction(run),
        "idle": (found.measured, found.idle_s),
        "waited": sum(waited_ns(headers, rows, ("tp", "dp", "model", "tied")) for rows in run.measured),
        "receives": sum(row.num_receives for rows in run.measured for row in rows),
        "loss": run.final_loss,
        "steps": (run.records.num_steps, run.records.num_incomplete_steps, run.records.num_lost_steps),
        "newest": [(row.step, row.loss) for row in run.records.newest],
        "skipped": [note for note in run_notes(run) if "skipped" in note],
    }


def test_sums_by_window_give_every_sum_and_mean_that_whole_steps_give(both):
    sums, whole = map(load_run, both)
    assert (len(sums.records.windows), len(sums.records.steps)) == (5, 3)
    assert (len(whole.records.windows), len(whole.records.steps)) == (0, 23)
    assert exact(sums) == exact(whole)
    assert exact(sums)["skipped"]


def test_medians_of_windows_are_near_those_of_steps(both):
    sums, whole = (bubble(load_run(path)) for path in both)
    assert sums is not None
    assert whole is not None
    for mine, theirs in zip(sums.stages, whole.stages, strict=True):
        assert mine.forward_s == pytest.approx(theirs.forward_s, rel=0.3)


def test_windows_of_one_step_each_give_the_whole_report_of_those_steps(tmp_path, both):
    single, whole = (
        json.loads(to_json(compare([path], None)).replace(str(path), "RUN"))
        for path in (written(tmp_path / "run", RUN, 1), both[1])
    )
    assert single["notes"].pop().startswith("run has sums of its steps 1 to 23")
    assert single == whole


def test_the_report_says_which_of_its_figures_are_over_windows(both):
    text = report_text(compare([both[0]], None))
    assert "run has sums of its steps 1 to 20, window by window: a median here is that" in " ".join(
        text.split()
    )
    assert "window" not in report_text(compare([both[1]], None))


def test_a_lost_window_is_refused_and_not_left_out(tmp_path):
    run_dir = written(tmp_path / "run", RUN, WINDOW)
    _, sums, _ = files_of(run_dir)
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join([*lines[:3], *lines[4:]]))
    with pytest.raises(LauncherError, match=r":4: the window from step 10 does not follow step 4"):
        read_run(run_dir)


def test_a_lost_last_window_is_refused(tmp_path):
    run_dir = written(tmp_path / "run", RUN, WINDOW)
    _, sums, _ = files_of(run_dir)
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(
        LauncherError, match=r"sums/rank-00000\.jsonl: no window ends with step 19, but .*rank-0"
    ):
        read_run(run_dir)


def test_a_window_that_contradicts_itself_is_refused(tmp_path):
    run_dir = written(tmp_path / "run", RUN, WINDOW)
    _, sums, _ = files_of(run_dir)
    lines = sums.read_text().splitlines()
    for change, problem in (
        ({"duration_ns": 5}, "the kinds sum to [0-9]+ ns, but the steps took 5 ns"),
        ({"num_steps": 0}, "it has at least 1 step, 1 token and 1 sample"),
        ({"kinds_ns": 3}, "kinds_ns, shortest_ns and compute_ns hold times"),
        ({"num_receives": -1}, "times and counts must be whole numbers of at least 0"),
        ({"shortest_ns": {"lunch": 1}}, "'lunch' is not a kind of time"),
        ({"shortest_ns": {"dp": 10**12}}, "of [0-9]+ ns in dp the shortest are 1000000000000 ns"),
        ({"loss": "low"}, "losses must be numbers or null"),
        ({"compute_ns": [10**20]}, "a time is longer than 292 years"),
    ):
        broken = json.dumps(json.loads(lines[2]) | change)
        sums.write_text("\n".join([*lines[:2], broken, *lines[3:], ""]))
        with pytest.raises(LauncherError, match=f":3: (window of [03] steps from 2: )?{problem}"):
            read_run(run_dir)


def test_calls_that_ranks_could_not_match_are_told_by_the_report(tmp_path):
    run_dir = written(tmp_path / "run", RUN, WINDOW)
    for rank in range(8):
        _, sums, _ = files_of(run_dir, rank)
        lines = sums.read_text().splitlines()
        window = json.loads(lines[2])
        window["shortest_ns"]["dp"] = None
        sums.write_text("\n".join([*lines[:2], json.dumps(window), *lines[3:], ""]))
    with pytest.raises(
        LauncherError, match="steps 2 to 4: ranks 0, 2 did not make the same dp calls; they cannot"
    ):
        load_run(run_dir)


def test_only_the_newest_windows_are_kept_whole(tmp_path):
    run = replace(
        RUN, mesh=Mesh(pp=1, dp=1, tp=1), kinds_ms={0: KINDS}, calls_ms={}, num_steps=2 * KEPT_WINDOWS + 7
    )
    run_dir = written(tmp_path / "run", run, 2)
    current, _, whole = files_of(run_dir)
    assert len(whole) == KEPT_WINDOWS
    kept = [record["step"] for path in (*whole, current) for record in records(path, "step")]
    assert kept == list(range(26 - 2 * KEPT_WINDOWS, 27))


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a type in a file."""
    return [record for record in map(json.loads, path.read_text().splitlines()) if record["type"] == kind]


ALL_CALLS = 10
"""Of the system, by two ranks at the end of a window."""


class Killed(BaseException):
    """In place of SIGKILL."""


@pytest.mark.parametrize("call", range(13))
def test_ranks_killed_anywhere_in_a_window_lose_no_step_and_count_none_twice(tmp_path, monkeypatch, call):
    """Of the end of a window two ranks, one after the other, make only so many calls of the system."""
    run = replace(RUN, mesh=Mesh(pp=1, dp=2, tp=1), kinds_ms=dict.fromkeys(range(2), KINDS), num_steps=10)
    run_dir = written(tmp_path / "run", run, WINDOW, slice(0, 9))
    headers, steps = varied_steps(run)
    for each in range(2):
        with files_of(run_dir, each)[0].open("a") as file:
            file.write(json.dumps(plain(steps[9][each])) + "\n")
    writers = [resumed_writer(run_dir, each) for each in range(2)]
    left = [call]

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return function(*args, **kwargs)

        return counted

    with monkeypatch.context() as patch:
        for owner, name in ((os, "fsync"), (Path, "mkdir"), (Path, "rename"), (Path, "open"), (Path, "glob")):
            patch.setattr(owner, name, counting(getattr(owner, name)))
        with suppress(Killed):
            end_window(writers, headers, steps[5:10], run.warmup_steps)
    assert (left[0] > 0) == (call > ALL_CALLS)
    found = read_run(run_dir)
    assert found.num_steps == 10
    assert kinds_of(found.headers, found.parts) == kinds_of(found.headers, steps)


def resumed_writer(run_dir: Path, rank: int) -> RecordWriter:
    """The writer of a rank in the middle of its start."""
    current, sums, _ = files_of(run_dir, rank)
    writer = RecordWriter.__new__(RecordWriter)
    writer.__dict__.update(
        _run_dir=run_dir,
        _rank=rank,
        _path=current,
        _start=1,
        _sums=sums.open("a", buffering=1),
        _file=current.open("a", buffering=1),
    )
    return writer


def kinds_of(headers: tuple[Header, ...], parts: Any) -> list[dict[str, int]]:
    """The time of each rank by kind."""
    totals: list[dict[str, int]] = [{} for _ in headers]
    for rows in parts:
        for total, kinds in zip(totals, split(headers, rows), strict=True):
            for kind, time in kinds.items():
                total[kind] = total.get(kind, 0) + time
    return totals


def test_a_start_from_an_earlier_step_takes_back_what_came_after_it(tmp_path):
    run_dir = written(tmp_path / "run", RUN, WINDOW)  # steps 0 to 22, of which 20 are in windows
    headers, steps = varied_steps(RUN, seed=1)
    write_windows(run_dir, headers, [], WINDOW)  # a start that makes no step hides nothing
    before = read_run(run_dir)
    assert (before.num_steps, before.num_starts, before.num_lost_steps) == (23, 2, 0)
    write_windows(run_dir, headers, steps[8:17], WINDOW, RUN.warmup_steps)
    again = read_run(run_dir)
    assert kinds_of(again.headers, again.parts) == kinds_of(again.headers, steps[8:17])
    assert [(rows[0].first_step, rows[0].step) for rows in again.windows] == [(8, 9), (10, 14)]
    assert (again.num_starts, again.num_lost_steps) == (3, 15)
    write_windows(run_dir, headers, steps[16:], WINDOW, RUN.warmup_steps)  # one step is made again
    last = read_run(run_dir)
    assert (last.num_steps, last.num_starts, last.num_lost_steps) == (7, 4, 16)


def growth(*run_dirs: Path) -> tuple[int, int]:
    """Bytes on the disk, and held by the report at most, that the second has more than the first."""
    held, sizes = [], []
    for run_dir in run_dirs:
        sizes.append(sum(path.stat().st_size for path in run_dir.rglob("*.jsonl")))
        tracemalloc.start()
        report_text(compare([run_dir], None))
        held.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return sizes[1] - sizes[0], held[1] - held[0]


MOST_BYTES = 3000
"""Of one rank and a window of 1,000 steps, on the disk and in memory: of a month with 64 ranks 96 MB."""


def test_what_the_report_reads_and_holds_grows_by_little_with_every_window(tmp_path):
    mesh = Mesh(pp=2, dp=2, tp=2)
    few, many = (write_month(tmp_path / str(n), n * WINDOW_STEPS, mesh) for n in (4, 24))
    assert max(growth(few, many)) / (20 * mesh.num_ranks) < MOST_BYTES


def test_whole_steps_would_take_a_hundred_times_as_much(tmp_path):
    few, many = (written(tmp_path / str(n), replace(RUN, num_steps=n), WINDOW_STEPS) for n in (20, 60))
    assert min(growth(few, many)) / (40 * RUN.mesh.num_ranks) * WINDOW_STEPS > 100 * MOST_BYTES


def test_a_window_that_ends_while_a_report_reads_is_seen_whole(tmp_path, monkeypatch):
    make_folders(tmp_path)
    headers, steps = varied_steps(SINGLE)
    writers = [RecordWriter(tmp_path, header) for header in headers]
    for first in (0, 5):
        for rows in steps[first : first + 5]:
            for writer, row in zip(writers, rows, strict=True):
                writer.write(row, until_window=True)
        if first == 0:
            end_window(writers, headers, steps[:5], 0)
    left = [lambda: end_window(writers, headers, steps[5:10], 0)]
    read = rank_files._text_of

    def text_of(path: Path) -> bytes | None:
        text = read(path)
        if left:
            left.pop()()
        return text

    monkeypatch.setattr(rank_files, "_text_of", text_of)
    assert read_run(tmp_path).num_steps == 10
