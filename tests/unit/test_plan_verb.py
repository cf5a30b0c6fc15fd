"""``trireme plan`` from the words of the command line to its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.app.data import data_rows
from launcher.base.errors import LauncherError
from launcher.cli.main import run_verb
from launcher.contract.plan import Plan
from launcher.plan.text import plan_text


def test_the_help_shows_commands_that_plan(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_verb("plan", ["--help"]) == 0
    shown = capsys.readouterr().out.partition("\n  --draw")[2].splitlines()
    commands = [line.split()[2:] for line in shown if line.startswith("  trireme plan")]
    assert commands[0] == []
    for words in commands:
        assert run_verb("plan", words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "schedule.svg"]
    assert "gpt_1t_3072xa100" in capsys.readouterr().out


def test_overrides_reach_the_plan(capsys):
    run_verb("plan", ["quickstart", "parallel.pp=4", "--json"])
    assert Plan.from_json(capsys.readouterr().out).mesh.pp == 4


def test_json_and_text_show_one_plan(capsys):
    run_verb("plan", ["--json"])
    plan = Plan.from_json(capsys.readouterr().out)
    run_verb("plan", [])
    assert capsys.readouterr().out == plan_text(plan, data=[*data_rows(plan)])


def test_out_writes_the_file_and_nothing_on_the_screen(tmp_path: Path, capsys):
    out = tmp_path / "my plan's.json"
    assert run_verb("plan", ["--json", "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text())["version"] == 1


def test_out_never_writes_over_a_file(tmp_path: Path):
    out = tmp_path / "thesis.tex"
    out.write_text("mine")
    with pytest.raises(
        LauncherError,
        match=r"--out .*thesis\.tex: the file already exists\. Remove it, or give another name\.",
    ):
        run_verb("plan", ["--out", str(out)])
    assert out.read_text() == "mine"


@pytest.mark.parametrize("name", ["n" * 300, "a\0b"])
def test_a_name_that_no_file_can_have_is_no_place_for_a_plan(tmp_path: Path, name: str):
    with pytest.raises(LauncherError, match=r"--out .*: (File name too long|embedded null byte)"):
        run_verb("plan", ["--out", str(tmp_path / name)])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(LauncherError, match=r"nowhere/plan\.txt: No such file or directory"):
        run_verb("plan", ["--out", str(tmp_path / "nowhere" / "plan.txt")])


def test_a_strategy_that_cannot_run_is_refused_with_the_override_that_set_it():
    with pytest.raises(
        LauncherError,
        match=r"parallel\.pp=3: the model has 4 layers and 1 chunk per rank, so pp must divide 4 "
        r"\(1, 2, 4\)\. Set parallel\.pp=4 or 2, or parallel\.layers_per_stage=auto\. "
        r"\[override parallel\.pp=3\]",
    ):
        run_verb("plan", ["quickstart", "parallel.pp=3"])


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("my schedule's.svg", "<svg "),
        ("trace.json", '{"displayTimeUnit": "ms"'),
        ("spans.csv", "stage,kind,microbatch,pp_rank,start_s,end_s\n0,F,0,0,0.0,"),
    ],
)
def test_a_drawing_is_written_beside_the_plan(tmp_path: Path, capsys, name: str, start: str):
    file = tmp_path / name
    assert run_verb("plan", ["quickstart", "parallel.schedule=zb_h1", "--draw", str(file)]) == 0
    assert file.read_text(encoding="utf-8").startswith(start)
    shown = capsys.readouterr()
    assert shown.out.startswith("quickstart: ")
    assert f"wrote {file}" in shown.err


def test_a_drawing_has_the_times_of_the_plan(tmp_path: Path, capsys):
    words = ["quickstart", "parallel.pp=4", "parallel.schedule=zb_h1"]
    run_verb("plan", [*words, "--json", "--draw", str(tmp_path / "spans.csv")])
    schedule = Plan.from_json(capsys.readouterr().out).schedule
    rows = [line.split(",") for line in (tmp_path / "spans.csv").read_text().splitlines()[1:]]
    assert len(rows) == 3 * 4 * 8
    seconds = {"F": schedule.forward_s, "B": schedule.backward_s, "W": schedule.weight_s}
    for stage, kind, _, pp_rank, start_s, end_s in rows:
        assert float(end_s) - float(start_s) == pytest.approx(seconds[kind][int(stage)])
        assert stage == pp_rank


@pytest.mark.parametrize("name", ["schedule.png", "schedule", "svg"])
def test_a_drawing_of_another_kind_is_refused_before_planning(tmp_path: Path, name: str):
    with pytest.raises(
        LauncherError,
        match=rf"--draw .*{name}: the name must end in one of \.svg \(a picture\), \.csv \(a table\), "
        r"\.json \(a trace for ui\.perfetto\.dev\)\.",
    ):
        run_verb("plan", ["no_such_recipe", "--draw", str(tmp_path / name)])


def test_a_drawing_never_replaces_a_file(tmp_path: Path):
    file = tmp_path / "schedule.svg"
    file.write_text("mine")
    with pytest.raises(LauncherError, match=r"schedule\.svg: the file already exists\. Remove it, or give"):
        run_verb("plan", ["quickstart", "--draw", str(file)])
    assert file.read_text() == "mine"


def test_a_drawing_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(LauncherError, match=r"--draw .*nowhere/plan\.svg: No such file or directory"):
        run_verb("plan", ["--draw", str(tmp_path / "nowhere" / "plan.svg")])
