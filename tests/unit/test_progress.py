import io
import json
import os
import re

import pytest

from launcher.app.progress import Progress, RunTail
from tests.helpers.objects import substitute

HEADER = {"type": "header", "rank": 1}


def step(number, loss=2.5, num_tokens=2048, duration_ns=500_000_000):
    return {
        "type": "step",
        "step": number,
        "loss": loss,
        "num_tokens": num_tokens,
        "duration_ns": duration_ns,
    }


def evaluation(number, loss):
    return {"type": "eval", "step": number, "loss": loss}


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def records(tmp_path):
    return tmp_path / "rank-00001.jsonl"


def append(path, *items):
    with path.open("a") as file:
        for item in items:
            file.write(json.dumps(item) + "\n")


def printed(out: io.StringIO) -> list[str]:
    """The lines of a stream that is no terminal, without the time that each begins with."""
    lines = [line.split(" ", 1) for line in out.getvalue().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp) for stamp, _ in lines)
    return [text for _, text in lines]


def test_what_the_ranks_go_on_from_is_said_once_for_each_start(records, tmp_path):
    out, note = io.StringIO(), tmp_path / "resumed.json"
    progress = Progress([records], 10, out, resumed=note)
    progress.update()
    note.write_text(json.dumps({"step": 4, "skipped": ["step-00000006 was skipped: damaged"]}))
    for _ in range(3):
        progress.update()
    note.write_text(json.dumps({"step": 8, "skipped": []}))
    os.utime(note, ns=(1, 1))
    progress.update()
    assert printed(out) == [
        "step-00000006 was skipped: damaged",
        "resumed after step 4",
        "resumed after step 8",
    ]


def test_a_piped_run_prints_its_first_step_then_lines_at_intervals_then_the_last(records):
    clock, out = Clock(), io.StringIO()
    progress = Progress([records], 10, out, clock=clock)
    progress.update()
    append(records, HEADER, step(0))
    for number in range(1, 10):
        progress.update()
        clock.now_s += 2
        append(records, step(number, loss=2.5 - number / 10))
    progress.update()
    progress.close()
    assert [line.split()[1] for line in printed(out)] == ["1/10", "4/10", "7/10", "10/10"]


def test_a_line_tells_step_loss_speed_and_time_to_go(records):
    out = io.StringIO()
    progress = Progress([records], 200, out)
    append(records, step(0), step(1, loss=2.4567), step(2, loss=2.25))
    progress.update()
    assert printed(out) == ["step   3/200   loss 2.2500   4.10K tokens/s   1 min 38 s to go"]


def test_samples_without_a_sequence_are_counted_as_samples(records):
    progress = Progress([records], 200, io.StringIO(), unit="samples")
    append(records, step(0, num_tokens=32))
    progress.update()
    assert "64 samples/s" in str(progress.view)


def test_the_slow_first_step_does_not_spoil_the_speed(records):
    progress = Progress([records], 4, io.StringIO())
    append(records, step(0, duration_ns=9_000_000_000), step(1), step(2))
    progress.update()
    assert progress.view.step_s == 0.5


def test_the_last_line_is_not_printed_twice(records):
    out = io.StringIO()
    progress = Progress([records], 1, out)
    append(records, step(0))
    progress.update()
    progress.close()
    assert out.getvalue().count("step 1/1") == 1


def test_an_evaluation_has_a_line_of_its_own(records):
    out = io.StringIO()
    progress = Progress([records], 3, out)
    append(records, step(0), evaluation(1, 2.34567))
    progress.update()
    assert "evaluation after 1 step: loss 2.3457\n" in out.getvalue()


def test_half_a_line_waits_for_its_rest(records):
    whole = json.dumps(step(0)) + "\n"
    tail = RunTail([records])
    records.write_text(whole[:20])
    assert list(tail.read()) == []
    records.write_text(whole)
    assert [record["step"] for record in tail.read()] == [0]


def test_a_resumed_run_starts_after_the_records_that_are_there(records):
    append(records, HEADER, step(0))
    tail = RunTail([records])
    append(records, HEADER, step(7))
    assert [record.get("step") for record in tail.read()] == [None, 7]


def test_a_file_that_was_moved_aside_and_has_grown_beyond_it_is_read_from_its_start(records):
    append(records, step(0))
    tail = RunTail([records])
    records.rename(records.with_suffix(".old"))
    append(records, step(3), step(4))
    assert [record["step"] for record in tail.read()] == [3, 4]


def test_what_was_left_of_a_file_when_the_next_took_its_place_is_read_first(records):
    append(records, HEADER, step(0))
    tail = RunTail([records])
    append(records, step(1), evaluation(2, 4.5))
    records.rename(records.with_suffix(".whole"))
    append(records, {"type": "segment", "start": 1, "newest_step": 1}, step(2))
    assert [record["step"] for record in tail.read()] == [1, 2, 2]
    assert list(tail.read()) == []


def test_a_terminal_gets_one_line_redrawn_and_erased(records, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    clock, out = Clock(), Terminal()
    progress = Progress([records], 9, out, clock=clock)
    clock.now_s = 3.0
    progress.update()
    assert out.getvalue() == "\rstarting the ranks   3 s"
    append(records, step(0))
    clock.now_s = 4.0
    progress.update()
    progress.close()
    drawn = "step 1/9   loss 2.5000   4.10K tokens/s   4 s to go"
    assert out.getvalue().split("\r")[2:] == [drawn, " " * len(drawn), drawn + "\n"]


def test_a_narrow_terminal_never_wraps(records, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "12")
    clock, out = Clock(), Terminal()
    progress = Progress([records], 9, out, clock=clock)
    append(records, step(0))
    clock.now_s = 1.0
    progress.update()
    assert out.getvalue() == "\rstep 1/9   "


def test_a_run_that_never_stepped_leaves_nothing_on_a_terminal(records, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    clock, out = Clock(), Terminal()
    progress = Progress([records], 9, out, clock=clock)
    clock.now_s = 1.0
    progress.update()
    progress.close()
    assert out.getvalue().endswith("\r")


def test_half_a_line_of_a_rank_that_was_killed_is_passed_over(records):
    records.write_text(json.dumps(step(0)) + "\n" + json.dumps(step(1))[:20])
    tail = RunTail([records])
    with records.open("a") as file:
        file.write("\n")
    append(records, HEADER, step(1))
    assert [record.get("step") for record in tail.read()] == [None, 1]


def test_a_new_start_does_not_count_the_speed_of_the_one_before(records):
    progress = Progress([records], 99, io.StringIO())
    append(records, HEADER, *map(step, range(5)), HEADER)
    append(records, step(3, duration_ns=9_000_000_000), step(4, duration_ns=250_000_000))
    progress.update()
    assert progress.view.step_s == 0.25


def test_skipped_steps_are_counted(records):
    out = io.StringIO()
    append(records, HEADER)
    progress = Progress([records], 3, out)
    substitute(progress, "_tail", RunTail([records]))
    append(
        records,
        step(0) | {"is_skipped": True},
        step(1) | {"is_skipped": False},
        step(2) | {"is_skipped": True},
    )
    progress.update()
    assert "2 skipped" in str(progress.view)
    assert progress.view.num_done == 3


def test_a_run_that_skips_nothing_says_nothing_of_it(records):
    append(records, HEADER, step(0))
    progress = Progress([records], 3, io.StringIO())
    substitute(progress, "_tail", RunTail([records]))
    append(records, step(1))
    progress.update()
    assert "skipped" not in str(progress.view)


def test_of_several_ranks_each_step_counts_once_and_the_furthest_tells_it(tmp_path):
    out, (first, second) = io.StringIO(), (tmp_path / "rank-00000.jsonl", tmp_path / "rank-00001.jsonl")
    progress = Progress([first, second], 400, out)
    append(first, HEADER, step(0, loss=5.0), step(1, loss=4.0), evaluation(2, 4.5))
    append(second, HEADER, step(0, loss=5.5), evaluation(2, 4.5))
    progress.update()
    assert (progress.view.num_done, progress.view.loss, len(progress.view.recent)) == (2, 4.0, 2)
    append(second, step(1, loss=4.25), step(2, loss=3.0))  # the first one is gone
    progress.update()
    assert (progress.view.num_done, progress.view.loss, len(progress.view.recent)) == (3, 3.0, 3)
    assert out.getvalue().count("evaluation") == 1


def test_a_new_start_of_several_ranks_counts_from_its_own_steps(tmp_path):
    paths = [tmp_path / "rank-00000.jsonl", tmp_path / "rank-00001.jsonl"]
    progress = Progress(paths, 400, io.StringIO())
    for path in paths:
        append(path, HEADER, step(0), step(1), step(2))
    progress.update()
    append(paths[1], HEADER, step(1))
    append(paths[0], step(3))  # of the start before
    progress.update()
    append(paths[0], HEADER, step(1))
    progress.update()
    assert (progress.view.num_done, len(progress.view.recent)) == (2, 1)
