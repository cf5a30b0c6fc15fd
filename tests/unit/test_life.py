"""The life of a run, told from what each of its starts left behind."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from launcher.app.life import life_text, starts_of
from launcher.base.files import write_whole
from launcher.cli.main import main
from launcher.contract.config import TrainConfig
from launcher.contract.heartbeat import SIZE, pack_into
from launcher.contract.job import JobState
from launcher.plan.build import build
from launcher.runs.store import RunDirectory
from tests.helpers.configs import launch_config
from tests.helpers.fake_runs import FakeRun

HOUR = 3600.0
T0 = datetime(2026, 5, 1, 12).timestamp()
RUNNING = JobState(phase="running")


def heartbeat(step: int, time: float) -> bytes:
    data = bytearray(SIZE)
    pack_into(data, time, step, b"compute")
    return bytes(data)


def left(folder: Path, **files: Any) -> None:
    """What a start left in its exit folder; ``__`` stands for a dot, and ``beat`` for rank 0's heartbeat."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name == "beat":
            (folder / "rank-0.heartbeat").write_bytes(heartbeat(*content))
        else:
            (folder / name.replace("__", ".").replace("rank_", "rank-")).write_text(json.dumps(content))


def failure(rank: int, error_type: str, message: str, traceback: str = "x") -> dict[str, Any]:
    return {"rank": rank, "time": 1.0, "error_type": error_type, "message": message, "traceback": traceback}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of 100 steps in which five starts ended in five ways, and a sixth makes steps."""
    path = FakeRun(num_steps=71).write(tmp_path / "run")
    train = TrainConfig(
        num_steps=100, eval_interval=0, eval_batches=0, checkpoint_interval=10, keep_checkpoints=9
    )
    (path / "plan.json").write_text(build(launch_config(train=train)).to_json())
    at = [T0 + number * 2 * HOUR for number in range(6)]
    left(path / "exit.1", start__json={"time": at[0], "job": "7"},
         stopped__json={"step": 20, "signal": "USR1"},
         job__json={"job": "7", "exit_code": 75})  # fmt: skip
    os.utime(path / "exit.1" / "job.json", (at[0] + HOUR,) * 2)
    left(path / "exit.2", start__json={"time": at[1], "job": "7"}, resumed__json={"step": 20},
         beat=(35, at[1] + HOUR))  # fmt: skip
    left(path / "exit.3", start__json={"time": at[2]}, resumed__json={"step": 30}, beat=(41, at[2] + HOUR),
         rank_1__json=failure(1, "out of memory", "cannot allocate", traceback=""))  # fmt: skip
    left(path / "exit.4", start__json={"time": at[3]}, resumed__json={"step": 40}, beat=(45, at[3] + 60),
         end__json={"time": at[3] + HOUR, "phase": "failed", "exit_code": -9, "rank": 3,
                    "reason": "killed by signal 9 (SIGKILL)"})  # fmt: skip
    left(path / "exit.5", start__json={"time": at[4]}, resumed__json={"step": 40}, beat=(50, at[4] + HOUR),
         end__json={"time": at[4] + HOUR, "phase": "cancelled", "reason": "SIGINT"})  # fmt: skip
    left(path / "exit", start__json={"time": at[5]}, resumed__json={"step": 50}, beat=(70, at[5] + HOUR))
    (path / "checkpoints" / "step-00000070").mkdir(parents=True)
    return RunDirectory(path)


def test_every_start_tells_its_steps_and_why_it_ended(run: RunDirectory) -> None:
    starts = starts_of(run, RUNNING)
    assert [(each.first, each.done, each.lost) for each in starts] == [
        (0, 20, 0), (20, 35, 5), (30, 41, 1), (40, 45, 5), (40, 50, 0), (50, 70, 0),
    ]  # fmt: skip
    assert [each.why for each in starts] == [
        "stopped by USR1, saved after step 20",
        "killed with its launcher or node: it left no word",
        "rank 1: cannot allocate",
        "rank 3 killed by signal 9 (SIGKILL)",
        "stopped by SIGINT",
        "",
    ]
    assert [each.length_s for each in starts] == [HOUR] * 5 + [None]
    assert [each.job for each in starts] == ["7", "7", "", "", "", ""]


def test_a_life_is_shown_with_its_sums_and_what_comes_next(run: RunDirectory) -> None:
    created = datetime.fromtimestamp(T0 - 60).isoformat()
    write_whole(run.status_file, json.dumps({"phase": "running", "started": created}))
    lines = life_text(run, RUNNING)
    first = "1 2026-05-01 12:00:00 7 1-20 1 h 0 min stopped by USR1, saved after step 20"
    assert lines[1].split() == first.split()
    assert lines[-4].split() == ["6", "2026-05-01", "22:00:00", "51-70", "it", "has", "not"]
    # 5 of 15 steps of an hour, 1 of 11, 5 of 5.
    assert lines[-3] == (
        "time: 5 h 0 min in 5 starts that ended, about 1 h 25 min of it for 11 steps that were lost, 5 h 1 "
        "min before and between them"
    )
    assert lines[-2] == "saved: after step 70"
    assert lines[-1].startswith("next: 29 steps left, about 2.9 s of training: done about 20")
    assert ", an estimate from the latest steps" in lines[-1]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (JobState(phase="succeeded"), "next: nothing: it is finished"),
        (
            JobState(phase="failed"),
            "next: nothing, until it is started by hand: --resume goes on after step 70",
        ),
        (
            JobState(phase="pending", reason="waits: Resources"),
            "next: it starts when its job does (waits: Reso",
        ),
    ],
)
def test_what_comes_next_follows_from_the_state(run: RunDirectory, state: JobState, told: str) -> None:
    assert life_text(run, state)[-1].startswith(told)


def test_steps_after_the_last_checkpoint_of_a_run_that_failed_are_lost(run: RunDirectory) -> None:
    left(run.path / "exit", beat=(77, T0 + 11 * HOUR))
    *_, last = starts_of(run, JobState(phase="failed", reason="ended with exit code 1"))
    assert (last.done, last.lost, last.why) == (77, 7, "failed: ended with exit code 1")


def test_a_finished_run_that_went_back_lost_the_steps_that_it_made_again(run: RunDirectory) -> None:
    left(run.path / "exit.5", end__json={"time": T0 + 9 * HOUR, "phase": "succeeded"})
    (run.path / "exit.5" / "rank-0.heartbeat").unlink()
    *_, before, last = starts_of(run, JobState(phase="succeeded"))
    assert (before.why, before.done, before.lost) == ("finished", 100, 50)
    assert (last.why, last.done, last.lost) == ("finished", 100, 0)


def test_a_hung_rank_is_named_and_not_one_that_waited_for_it(run: RunDirectory) -> None:
    for rank, doing in ((1, b"dp"), (3, b"compute")):
        data = bytearray(SIZE)
        pack_into(data, T0, 34, doing)
        (run.path / "exit.2" / f"rank-{rank}.heartbeat").write_bytes(data)
        (run.path / "exit.2" / f"rank-{rank}.stacks").write_text("Thread 0x1")
    (run.path / "exit.2" / "rank-0.heartbeat").unlink()
    assert starts_of(run, RUNNING)[1].why.startswith("rank 3 hung in a forward or backward of step 35: ")


VICTIM = failure(0, "DistBackendError", "a peer is gone") | {"time": 0.5}
ENDED = {"phase": "failed", "exit_code": 1, "rank": 2, "reason": "ended with exit code 1"}


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"finished": 0}, "finished"),
        ({"end__json": {"phase": "succeeded"}}, "finished"),
        ({"job__json": {"exit_code": 75}}, "interrupted before it could save"),
        ({"job__json": {"exit_code": 9}}, "its job ended with code 9"),
        ({"job__json": {"exit_code": 75}, "unfit": "node1 gives no answer"}, '"node1 gives no answer"'),
        ({"rank_0__json": failure(0, "ValueError", "no\nplanet")}, "rank 0: ValueError: no"),
        ({"rank_0__json": VICTIM, "rank_1__json": failure(1, "ValueError", "no")}, "rank 1: ValueError: no"),
        ({"end__json": ENDED, "rank_0__json": failure(0, "ValueError", "no"),
          "rank_2__json": failure(2, "KeyError", "x")}, "rank 2: KeyError: x"),
        ({"end__json": ENDED | {"exit_code": -9, "reason": "was killed"}, "rank_0__json": VICTIM},
         "rank 2 was killed"),
        ({"end__json": ENDED | {"reason": "hung"}, "rank_0__json": VICTIM}, "rank 2 hung"),
        ({"end__json": {"phase": [], "exit_code": "x", "time": {}}, "rank_0__json": [3]}, "killed with its "
         "launcher or node: it left no word"),
    ],
)  # fmt: skip
def test_an_end_is_told_by_whatever_it_left(tmp_path: Path, files: dict[str, Any], why: str) -> None:
    left(tmp_path / "exit.1", **files)
    (start,) = starts_of(RunDirectory(tmp_path), RUNNING)
    assert start.why == why


def test_a_run_without_a_readable_file_has_a_life(tmp_path: Path) -> None:
    assert life_text(RunDirectory(tmp_path), JobState(phase="failed"))[0] == "no start of it is recorded"
    (tmp_path / "plan.json").write_text("{")
    left(tmp_path / "exit", rank_0__json={})
    lines = life_text(RunDirectory(tmp_path), JobState(phase="failed", reason="it has no status.json"))
    assert lines[1].endswith("failed: it has no status.json")
    assert lines[-1] == "next: nothing, until it is started by hand; nothing is saved to go on from"


def test_a_run_of_slurm_says_what_goes_on_with_it(run: RunDirectory) -> None:
    plan = json.loads(run.plan.read_text())
    plan["config"]["executor"] = {"name": "slurm", "max_starts": 9}
    run.plan.write_text(json.dumps(plan))
    assert life_text(run, RUNNING)[-1].endswith(
        "; if it is interrupted, its job is requeued: start 7 of at most 9"
    )


def test_status_tells_the_life_of_the_one_run_that_is_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write_whole(run.job, "{}")
    write_whole(run.status_file, json.dumps({"phase": "failed"}))
    assert main(["status", str(run.path)]) == 0
    assert "\nnext: nothing, until it is started by hand" in capsys.readouterr().out
    assert main(["status", str(run.path), str(run.path)]) == 0
    assert "next:" not in capsys.readouterr().out
