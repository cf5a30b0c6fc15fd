"""Any content in a run directory: every verb about it ends, without a traceback, and shows the other runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.base.errors import LauncherError
from launcher.cli.main import main
from launcher.runs.store import RunDirectory, check_idle

STORED = Path(__file__).parents[1] / "golden" / "stored_runs" / "pp2"
FILES = (
    *("status.json", "job.json", "handle.json", "plan.json", "config.yaml", "inputs.json"),
    *("metrics/rank-00000.jsonl", "exit/rank-0.json", "exit/rank-0.heartbeat", "exit/stopped.json"),
    *("exit/resumed.json", "logs/rank-0.log", "logs/executor.log", "logs/failures", "exit/job.json"),
)
VERBS = ("report", "logs", "wait", "cancel", "status")
SOON_S = 20
NUMBERS = st.one_of(
    st.integers(-2, 2), st.floats(), st.sampled_from([10**30, -(10**400), 1e308, os.getpid(), os.getppid()])
)
WORDS = st.sampled_from(
    ["running", "pending", "succeeded", "failed", "\x1b[31m", "\u202e", "", socket.gethostname()]
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=8))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
quick = settings(
    derandomize=True, database=None, max_examples=40, suppress_health_check=list(HealthCheck), deadline=None
)


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, bytes | str]:
    """A file, and what it is: its bytes, or ``pipe``, ``folder``, ``loop``."""
    name = draw(st.sampled_from(FILES))
    kind = draw(st.sampled_from(["value", "leaf", "leaf", "cut", "bytes", "deep", "pipe", "folder", "loop"]))
    old = (STORED / name).read_bytes() if (STORED / name).exists() else b'{"phase": "running", "id": "7"}'
    if kind == "value":
        return name, json.dumps(draw(VALUES)).encode()
    if kind == "leaf" and name.endswith(".json"):
        value = json.loads(old)
        put(draw, value)
        return name, json.dumps(value).encode()
    if kind == "cut":
        return name, old[: draw(st.integers(0, len(old)))]
    if kind in ("bytes", "leaf"):
        return name, draw(st.binary(max_size=40))
    return name, draw(st.sampled_from(["[", '{"a":'])).encode() * 50_000 if kind == "deep" else kind


def put(draw: st.DrawFn, value: Any) -> None:
    """Puts something else into one place of a JSON value."""
    while isinstance(value, dict | list) and value:
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        if not isinstance(value[key], dict | list) or not value[key] or draw(st.integers(0, 3)) == 0:
            value[key] = draw(VALUES)
            return
        value = value[key]


@contextlib.contextmanager
def damaged(name: str, content: bytes | str) -> Iterator[Path]:
    """A folder of runs, of which one has such a file."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for each in ("broken", "whole"):
            shutil.copytree(STORED, Path("runs", each))
        path = Path("runs", "broken", name)
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if content == "pipe":
            os.mkfifo(path)
        elif content == "folder":
            path.mkdir()
        elif content == "loop":
            path.symlink_to(path.name)
        else:
            path.write_bytes(content if isinstance(content, bytes) else b"")
        yield Path("runs", "broken")


@pytest.fixture(autouse=True)
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends what hangs, and fails what signals a process."""

    def too_long(number: int, frame: object) -> None:
        raise AssertionError("it hangs")

    def refuse(*given: int) -> None:
        raise AssertionError(f"signals {given}")

    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, refuse)
    signal.signal(signal.SIGALRM, too_long)
    yield
    signal.alarm(0)


def printed(*words: str) -> str:
    """What a verb prints, all of which a terminal shows as it is."""
    signal.alarm(SOON_S)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        assert main(list(words)) in range(256)
    shown = out.getvalue()
    assert "Traceback" not in shown
    if words[0] != "logs":  # which gives a file the bytes as they are, and escapes them on a terminal alone
        assert all(letter.isprintable() or letter in "\n\t" for letter in shown), ascii(shown)
    return shown


def goes_on_elsewhere(run: Path) -> bool:
    """Whether its state says that it is followed: to wait for it is what was asked for."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if (run / "status.json").is_file():
            status = json.loads((run / "status.json").read_bytes())
            return isinstance(status, dict) and status.get("phase") in ("running", "pending")
    return False


@given(damages())
@quick
def test_every_verb_ends_and_shows_the_other_runs(damage: tuple[str, bytes | str]) -> None:
    with damaged(*damage) as run:
        for verb in VERBS:
            if not (verb == "wait" and goes_on_elsewhere(run)):
                printed(verb, "broken")
        assert "whole" in printed("status")


@given(damages())
@quick
def test_a_damaged_run_is_resumed_or_refused(damage: tuple[str, bytes | str]) -> None:
    with damaged(*damage) as run, contextlib.suppress(LauncherError):
        signal.alarm(SOON_S)
        check_idle(RunDirectory(run.absolute()))


def test_a_pipe_would_be_waited_for_by_a_plain_read() -> None:
    with damaged("status.json", "pipe") as run:
        signal.alarm(1)
        with pytest.raises(AssertionError, match="it hangs"):
            (run / "status.json").read_bytes()
