"""A run that is resumed compares its data and its code with those that it was started with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.contract.config import LaunchConfig
from launcher.contract.inputs.record import INPUTS, read_inputs
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.runs.freeze import freeze, frozen_plan
from launcher.runtime.data.inputs import check_inputs
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context as context_of
from launcher.runtime.train.loop import train
from tests.helpers.configs import launch_config, with_settings
from tests.helpers.contexts import CPU, make_config, make_context
from tests.helpers.plans import staged_plan
from tests.helpers.ranks import RankError, run_ranks

LAB = """
import random
import torch
import scale

class Counts:
    def __init__(self, shift=0, count=40):
        self.shift, self.count = shift, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = torch.full((6,), (index + self.shift) % 37)
        return tokens, tokens

class Noted(Counts):
    def __getitem__(self, index):
        with open("reads", "a") as file:
            file.write(f"{index}\\n")
        return super().__getitem__(index)

class Noise(Counts):
    def __getitem__(self, index):
        tokens = torch.tensor(random.SystemRandom().choices(range(37), k=6))
        return (tokens, tokens) if index else super().__getitem__(index)
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with datasets."""
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "counts.py").write_text(LAB)
    (folder / "scale.py").write_text("FACTOR = 1\n")
    (folder / "other.py").write_text("")
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in ("counts", "scale"):
        sys.modules.pop(name, None)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    for name in ("exit", "metrics"):
        (path / name).mkdir(parents=True)
    (path / "job.json").write_text(json.dumps({"recipe": "mine", "overrides": ["run.dir=run"]}))
    return path


def own(name: str = "Counts", **options: Any) -> LaunchConfig:
    return make_config(data={"target": f"counts:{name}", "options": options})


def start(config: LaunchConfig, run_dir: Path, roots: tuple[str, ...] = (), *, resume: bool = False) -> None:
    """What one rank does at its start, without a training."""
    ctx = make_context(replace(staged_plan(config), source_roots=roots))
    check_inputs(ctx, Loader(ctx), run_dir, resume=resume)


def test_items_that_are_the_same_are_gone_on_with_and_shifted_ones_are_named(
    lab: Path, run_dir: Path
) -> None:
    start(own(), run_dir)
    before = (run_dir / INPUTS).read_text()
    start(own(), run_dir, resume=True)
    assert (run_dir / INPUTS).read_text() == before
    with pytest.raises(
        ConfigError,
        match=r"cannot resume: 8 inputs changed since it was started: data item 0 \(\w{12} -> \w{12}\), data "
        r"item 5 .*, and 3 more\. Put back what it was started with, or go on all the same: "
        r"trireme run mine run\.dir=\S+/run --resume --accept-changed-inputs$",
    ):
        start(own(shift=1), run_dir, resume=True)
    with pytest.raises(
        ConfigError,
        match=r"5 inputs changed .*data number of items \(36 -> 18\), data item 20 \(\w{12} -> missing",
    ):
        start(own(count=20), run_dir, resume=True)


def test_a_start_reads_an_item_twice_and_a_resume_once(
    lab: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lab)
    compared = [*range(0, 40, 5)]
    for resume, num_reads in ((False, 2), (True, 1)):
        Path("reads").write_text("")
        start(own("Noted"), run_dir, resume=resume)
        assert sorted(map(int, Path("reads").read_text().split())) == sorted(compared * num_reads)


def test_items_that_are_drawn_anew_each_time_are_not_compared(lab: Path, run_dir: Path) -> None:
    start(own("Noise"), run_dir)
    found = read_inputs(run_dir)
    assert found is not None
    assert list(found.data) == ["number of items", "item 0"]
    start(own("Noise"), run_dir, resume=True)


def test_code_that_has_changed_is_named_and_what_nobody_imports_may_change(lab: Path, run_dir: Path) -> None:
    roots = (str(lab),)
    start(own(), run_dir, roots)
    (lab / "other.py").write_text("FACTOR = 3\n")
    start(own(), run_dir, roots, resume=True)
    (lab / "scale.py").write_text("FACTOR = 3\n")
    with pytest.raises(
        ConfigError, match=r"1 input changed since it was started: code scale\.py \(\w{12} -> "
    ):
        start(own(), run_dir, roots, resume=True)


def test_the_frozen_code_of_a_job_is_the_code_that_it_was_frozen_from(lab: Path, run_dir: Path) -> None:
    plan = replace(staged_plan(own()), source_roots=(str(lab),))
    start(own(), run_dir, plan.source_roots)
    freeze(plan.source_roots, run_dir)
    (lab / "scale.py").write_text("FACTOR = 3\n")
    start(own(), run_dir, frozen_plan(plan, run_dir).source_roots, resume=True)


def test_a_run_of_before_there_were_records_goes_on_and_has_one_from_then_on(
    lab: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(own(), run_dir, resume=True)
    assert "the run has no inputs.json with the data and the code" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="cannot resume"):
        start(own(shift=1), run_dir, resume=True)


def trained(rank: int, plan: Plan, run_dir: Path, resume: bool) -> None:
    train(context_of(plan.rank(rank), CPU), run_dir, resume=resume)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_ranks_go_on_with_the_text_that_they_began_with_and_with_no_other(
    is_reversed: bool, tmp_path: Path, run_dir: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(map(str, range(2000))))
    data = {"source": str(text), "cache_dir": str(tmp_path / "cache")}
    config = with_settings(
        launch_config(parallel={"pp": 2}),
        {"data": data, "train": {"num_steps": 2, "checkpoint_interval": 1}, "optim": {"decay": "constant"}},
    )
    run_ranks(2, trained, build(config), run_dir, False)
    longer = build(with_settings(config, {"train": {"num_steps": 3}}))
    if not is_reversed:
        run_ranks(2, trained, longer, run_dir, True)
        assert json.loads((run_dir / "exit" / "resumed.json").read_text())["step"] == 2
        return
    text.write_text(text.read_text()[::-1])
    with pytest.raises(RankError, match=r"1 input changed .*: data text\.txt \(6890 bytes, \w{12} -> 6890"):
        run_ranks(2, trained, longer, run_dir, True)
