"""``trireme plan`` from the words of the command line to its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli import plan as verb
from launcher.errors import LauncherError
from launcher.plan.model import Plan
from launcher.plan.text import plan_text


def test_the_help_shows_commands_that_plan(capsys):
    commands = [line.split()[2:] for line in verb.HELP.splitlines() if line.startswith("  trireme plan")]
    assert commands[0] == []
    for words in commands:
        if "--out" not in words:
            assert verb.run(words) == 0
    assert "gpt_1t_3072xa100" in capsys.readouterr().out


def test_overrides_reach_the_plan(capsys):
    verb.run(["quickstart", "parallel.pp=4", "--json"])
    assert Plan.from_json(capsys.readouterr().out).mesh.pp == 4


def test_json_and_text_show_one_plan(capsys):
    verb.run(["--json"])
    plan = Plan.from_json(capsys.readouterr().out)
    verb.run([])
    assert capsys.readouterr().out == plan_text(plan)


def test_out_writes_the_file_and_nothing_on_the_screen(tmp_path: Path, capsys):
    out = tmp_path / "my plan's.json"
    assert verb.run(["--json", "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text())["version"] == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(LauncherError, match=r"nowhere/plan\.txt: No such file or directory"):
        verb.run(["--out", str(tmp_path / "nowhere" / "plan.txt")])


def test_a_strategy_that_cannot_run_is_refused_with_the_override_that_set_it():
    with pytest.raises(
        LauncherError,
        match=r"parallel\.pp=3: the model has 4 layers and 1 chunk per rank, so pp must divide 4 "
        r"\(1, 2, 4\)\. Set parallel\.pp=4, or give parallel\.layers_per_stage=\[2,1,1\]\. "
        r"\[override parallel\.pp=3\]",
    ):
        verb.run(["quickstart", "parallel.pp=3"])
