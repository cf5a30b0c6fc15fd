"""`trireme export` finds the run, refuses what it would write over, and leaves torch to another process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.base.errors import LauncherError
from launcher.cli.main import run_verb


@pytest.fixture
def a_run(tmp_path):
    run = tmp_path / "my run"
    run.mkdir()
    (run / "job.json").write_text("{}")
    return run


def test_the_exporter_is_a_process_of_its_own_whose_exit_code_counts(a_run, tmp_path, monkeypatch):
    started = []

    def start(command, *, check):
        started.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", start)
    assert run_verb("export", [str(a_run), str(tmp_path / "model")]) == 3
    assert started == [
        [
            sys.executable,
            "-P",
            "-m",
            "launcher.runtime.checkpoint.export",
            str(a_run),
            str(tmp_path / "model"),
        ]
    ]


def test_a_folder_that_is_there_is_not_written_over(a_run, tmp_path):
    with pytest.raises(LauncherError, match=r"is there already, and is not written over: give a new folder"):
        run_verb("export", [str(a_run), str(tmp_path)])


@pytest.mark.parametrize("words", [[], ["one"], ["one", "two", "three"]])
def test_two_words_are_needed(words):
    with pytest.raises(LauncherError, match=r"trireme export takes a run directory and a folder to write"):
        run_verb("export", words)


def test_a_run_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LauncherError, match=r"no run directory at .*nowhere"):
        run_verb("export", [str(tmp_path / "nowhere"), str(tmp_path / "model")])
