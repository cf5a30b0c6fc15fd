"""Verbs about a run that somebody's disk or editor has damaged: refused or shown, never a traceback."""

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from launcher.base.errors import JobError
from launcher.cli.main import main
from launcher.runs.store import RunDirectory, check_idle

STORED = Path(__file__).parents[1] / "golden" / "stored_runs" / "pp2"
VERBS = ("report", "status", "logs", "wait", "cancel")
DEEP = "[" * 100_000
SOON_S = 20
WRONG: dict[str, Any] = {
    "number": 7,
    "huge": 10**400,
    "text": "x",
    "list": [[]],
    "object": {"a": {}},
    "none": None,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["n" * 300, "\x1b[31m"])
def test_a_name_that_no_run_has_is_refused_in_one_short_line(verb, name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([verb, name]) == 2
    error = capsys.readouterr().err
    assert "no run directory at" in error or "holds no plan.json" in error
    assert error.rstrip("\n").isprintable()
    assert len(error) < 300


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("plan", [b"\xff\x00", b"[]", b"{}", b""])
def test_a_damaged_plan_is_refused_or_not_needed(verb, plan, capsys, tmp_path):
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "plan.json").write_bytes(plan)
    main([verb, str(tmp_path)])
    error = capsys.readouterr().err
    if verb in ("report", "wait"):
        assert "plan.json cannot be read as a plan: " in error or "plan.json has version None" in error


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
@pytest.mark.parametrize("status", ["[]", "{", '{"phase": "running"}', '{"phase": "running", "pid": "x"}'])
def test_a_damaged_status_is_shown_as_it_is(verb, status, capsys, tmp_path):
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "status.json").write_text(status)
    code = main([verb, str(tmp_path)])
    captured = capsys.readouterr()
    assert (code, captured.err.count("\n")) in ((0, 0), (2, 1))
    if verb == "status":
        shown = "running" if status == '{"phase": "running"}' else "failed  "
        assert shown in captured.out
    if verb == "cancel" and status == '{"phase": "running"}':
        assert captured.err == "the run was started on another machine: cancel it there\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stored run beside another one, in a folder of runs. What hangs is ended."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SOON_S)
    monkeypatch.chdir(tmp_path)
    for name in ("broken", "whole"):
        shutil.copytree(STORED, tmp_path / "runs" / name)
    return tmp_path / "runs" / "broken"


@pytest.fixture(autouse=True)
def no_alarm() -> Any:
    yield
    signal.alarm(0)


def spoil(path: Path, how: str) -> None:
    """Makes something else of a file."""
    path.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path)
    else:
        text = {"deep": DEEP, "deep object": '{"a":' * 100_000, "list": "[1]", "null": "null", "empty": ""}
        path.write_text(text[how])


def ends_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        main([verb, "broken"])
    capsys.readouterr()
    main(["status"])
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines() if line.startswith(("broken", "whole"))]
    assert "whole" in table


@pytest.mark.parametrize("how", ["pipe", "folder", "loop", "deep", "deep object", "list", "null", "empty"])
@pytest.mark.parametrize(
    "name",
    [
        *("plan.json", "status.json", "job.json", "handle.json", "config.yaml", "metrics/rank-00000.jsonl"),
        *("exit/rank-0.json", "exit/rank-0.heartbeat", "exit/rank-0.stacks", "exit/resumed.json"),
        *("logs/rank-0.log", "logs/executor.log"),
    ],
)
def test_a_file_that_is_something_else_breaks_no_verb(
    name: str, how: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run / name, how)
    ends_without_a_traceback(capsys)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["status.json", "job.json", "handle.json", "plan.json"])
def test_values_of_wrong_types_break_no_verb(
    name: str, wrong: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / name
    values = json.loads(path.read_text()) if path.exists() else {"executor": "slurm", "id": "7"}
    for key in [*values, None]:
        changed = values | {key: WRONG[wrong]} if key else dict.fromkeys(values, WRONG[wrong])
        path.write_text(json.dumps(changed))
        ends_without_a_traceback(capsys)


@pytest.mark.parametrize("birth", ["", "a process that had this number before"])
def test_a_process_that_is_not_surely_the_runs_own_is_not_ended(
    birth: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        status = {"phase": "running", "pid": other.pid, "birth": birth, "hostname": socket.gethostname()}
        (run / "status.json").write_text(json.dumps(status))
        main(["cancel", "broken"])
        answer = capsys.readouterr()
        assert other.poll() is None
        other.kill()
    assert (
        "cannot be told whether that follows the run" in answer.err
        if not birth
        else "ended already: failed" in answer.out
    )


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_a_number_that_is_no_follower_is_signalled_never(
    pid: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: int) -> None:
        raise AssertionError(f"signals {given}")

    monkeypatch.setattr(os, "kill", refuse)
    status = {"phase": "running", "pid": pid, "hostname": socket.gethostname()}
    (run / "status.json").write_text(json.dumps(status))
    main(["cancel", "broken"])


@pytest.mark.parametrize("how", ["pipe", "list", "empty"])
def test_a_run_whose_state_cannot_be_read_is_not_taken_for_ended(how: str, run: Path) -> None:
    spoil(run / "status.json", how)
    file = run / "status.json"
    with pytest.raises(
        JobError, match=r"not known whether the run has ended\. broken: status\.json"
    ) as refused:
        check_idle(RunDirectory(run))
    assert str(refused.value).endswith(f"See that no process and no job has it, then remove {file}.")
    file.unlink()
    check_idle(RunDirectory(run))
