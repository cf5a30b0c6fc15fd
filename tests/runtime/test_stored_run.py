"""Runs that an earlier version has stored, whose plans name modules that have moved since."""

import json
import shutil
from pathlib import Path

import pytest

from launcher.app.launch import launch
from launcher.app.request import Request
from launcher.base.registry import resolve
from launcher.cli.main import main
from launcher.report.runs import read_plan

STORED = Path(__file__).parents[1] / "golden" / "stored_runs"
OVERRIDES = (
    "data=text",
    "data.source=text.txt",
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_heads=2",
    "batch.seq_length=16",
    "batch.global_size=4",
    "batch.micro_size=2",
    "train.eval_interval=0",
    "data.cache_dir=cache",
    "run.dir=pp2",
    "train.num_steps=60",
    "train.checkpoint_interval=4",
)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps(path):
    records = map(json.loads, path.read_text().splitlines())
    return [record["step"] for record in records if record["type"] == "step"]


def test_what_a_stored_plan_names_is_there_by_its_present_name(stored):
    plan = read_plan(stored / "pp2")
    names = [*plan.parallels, plan.update, plan.program, *(record.target for record in plan.plugins)]
    assert all(map(resolve, names))
    text = (stored / "pp2" / "plan.json").read_text()
    assert sum(name not in text for name in names) > 4, "the stored plan holds old names"


def test_a_stored_run_is_reported(stored, capsys):
    assert main(["report", "one"]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_a_stored_run_is_gone_on_with(stored, capsys):
    assert steps(stored / "pp2" / "metrics" / "rank-00000.jsonl") == list(range(27))
    asked = Request(recipe="quickstart", overrides=OVERRIDES, resume=True, wants_baseline=False)
    assert launch(asked).exit_code == 0
    assert "resumed after step 27" in capsys.readouterr().out
    assert steps(stored / "pp2" / "metrics" / "rank-00000.jsonl") == list(range(60))
