import json
import time
from pathlib import Path

from launcher.app.progress import last_step
from launcher.cli.runs.status import table
from launcher.contract.job import JobState
from launcher.runs.store import RunDirectory


def row(name, phase, minutes=0, **details):
    since_s = time.time() - 60 * minutes
    return RunDirectory(Path(f"/runs/{name}")), JobState(phase=phase, since_s=since_s, **details)


def test_active_runs_come_first_and_then_the_newest_that_ended():
    rows = [row("old", "succeeded", 9), row("new", "failed", 1), row("b", "pending"), row("a", "running")]
    lines = table(rows, is_whole=False)
    assert [line.split()[0] for line in lines[1:5]] == ["a", "b", "new", "old"]
    assert lines[-1] == "4 runs: 1 running, 1 pending, 1 failed, 1 succeeded"


def test_two_hundred_runs_stay_readable():
    rows = [row(f"run-{number:03d}", "succeeded", number) for number in range(198)]
    rows += [row("live", "running"), row("next", "pending", reason="waits: Resources")]
    lines = table(rows, is_whole=False)
    assert len(lines) == 1 + 2 + 10 + 2
    assert lines[2].endswith("waits: Resources")
    assert lines[3].split()[0] == "run-000"
    assert lines[-1] == "200 runs: 1 running, 1 pending, 198 succeeded; 188 not shown, --all shows them"
    assert max(map(len, lines)) <= 100


def test_a_failed_run_names_its_guilty_rank():
    (_, line) = table([row("a", "failed", reason="ended with exit code 17", rank=3)], is_whole=False)
    assert line.endswith("rank 3 ended with exit code 17")


def test_a_failed_run_tells_what_its_guilty_rank_raised_in_a_line_that_fits(tmp_path):
    (tmp_path / "exit").mkdir()
    report = {"rank": 2, "time": 1.0, "error_type": "ValueError", "traceback": "Traceback"}
    message = "the batch of step 7 " + "is wrong " * 20
    (tmp_path / "exit" / "rank-2.json").write_text(json.dumps(report | {"message": message}))
    failed = JobState(phase="failed", exit_code=1, reason="ended with exit code 1", rank=2)
    (_, line) = table([(RunDirectory(tmp_path), failed)], is_whole=False)
    assert "  rank 2: ValueError: the batch of step 7 is wrong" in line
    assert line.endswith(" ...")


def test_the_step_is_the_newest_whole_record_of_rank_zero(tmp_path):
    directory = RunDirectory(tmp_path)
    assert last_step(directory) == ""
    (tmp_path / "metrics").mkdir()
    padding = "x" * 70000
    directory.records(0).write_text(
        '{"type":"header","padding":"' + padding + '"}\n'
        '{"type":"step","step":3}\n{"type":"step","step":4}\n{"type":"eval","step":5}\n{"type":"st'
    )
    assert last_step(directory) == "5/?"
    directory.plan.write_text('{"config": {"train": {"num_steps": 150}}}')
    assert last_step(directory) == "5/150"


def test_the_step_is_known_while_none_was_made_since_the_last_window(tmp_path):
    directory = RunDirectory(tmp_path)
    (tmp_path / "metrics").mkdir()
    directory.records(0).write_text('{"type":"segment","start":1,"newest_step":999}\n')
    assert last_step(directory) == "1000/?"


def test_a_line_that_a_killed_rank_left_half_written_is_passed_over(tmp_path):
    directory = RunDirectory(tmp_path)
    (tmp_path / "metrics").mkdir()
    directory.records(0).write_text('{"type":"step","step":3}\n{"type":"st\n{"type":"header"}\n')
    assert last_step(directory) == "4/?"


def test_of_workers_that_may_be_gone_the_furthest_tells_the_step(tmp_path):
    directory = RunDirectory(tmp_path)
    (tmp_path / "metrics").mkdir()
    for rank, step in enumerate((128, 398, 397, 400)):
        directory.records(rank).write_text(f'{{"type":"step","step":{step}}}\n')
    workers = {"first_rank": 0, "num_ranks": 3, "trains": True}
    train = {"config": {"train": {"num_steps": 400}}}
    for is_expendable, expected in ((True, "399/400"), (False, "129/400")):
        roles = [workers | {"is_expendable": is_expendable}, {"first_rank": 3, "num_ranks": 1}]
        directory.plan.write_text(json.dumps(train | {"roles": roles}))
        assert last_step(directory) == expected
