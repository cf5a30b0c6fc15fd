"""A user's own dataset for a built-in model is measured when it is planned: what is too small, or of another
shape, is refused by every verb, before anything is made; what the user's code prints does no harm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.app import user_model
from launcher.app.planning import make_plan
from launcher.base.errors import ConfigError, PlanError
from launcher.base.processes import birth_of
from launcher.cli.main import main
from launcher.runtime.process import measure
from tests.helpers.waiting import wait_until

ROWS = """
import os
print("of the module")
os.system("echo of what it starts")

def build(count=1000, length=128):
    row = list(range(length))
    return [(row, row)] * count

def stream():
    return iter(build())
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process, which has torch, as far as it is not the process that a test is about."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rows", raising=False)
    monkeypatch.setattr(user_model, "_measure", lambda request: measure.measured(json.loads(request)))
    yield
    sys.modules.pop("rows", None)


def words(*others: str, target: str = "rows:build") -> list[str]:
    return ["quickstart", "data=custom", f"data.target={target}", "report.baseline=none", *others]


SMALL = words(
    "data.options={count: 21}", "data.eval_fraction=0", "train.eval_batches=0", "batch.global_size=32"
)
TOO_FEW = (
    "batch.global_size=32: needs as many samples, and the training part of rows:build has 21: give more "
    "data. Set batch.global_size="
)


@pytest.mark.parametrize("verb", [["plan"], ["run"], ["submit"], ["submit", "--dry-run"], ["sweep", "plan"]])
def test_too_few_samples_are_refused_by(
    verb: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = ["seed=1,2"] if "sweep" in verb else []
    assert main([*verb, *SMALL, *swept]) == 2
    answer = capsys.readouterr()
    assert "the training part of rows:build has 21" in " ".join((answer.err + answer.out).split())
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"rows.py"}


@pytest.mark.usefixtures("_measured_here")
@pytest.mark.parametrize("layout", ["dp", "tp", "pp"])
def test_too_few_samples_are_refused_with(layout: str) -> None:
    sizes = {"dp": 1, "tp": 1, "pp": 1} | {layout: 2}
    with pytest.raises(PlanError) as caught:
        make_plan("quickstart", [*SMALL[1:], *(f"parallel.{axis}={size}" for axis, size in sizes.items())])
    assert TOO_FEW in str(caught.value)


@pytest.mark.usefixtures("_measured_here")
def test_as_many_samples_as_a_step_takes_are_planned() -> None:
    enough = words(
        "data.options={count: 32}", "data.eval_fraction=0", "train.eval_batches=0", "batch.global_size=32"
    )
    assert make_plan("quickstart", enough[1:]).plan.batch.global_size == 32


@pytest.mark.usefixtures("_measured_here")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            words("data.options={length: 63}"),
            r"data\.target=rows:build: the input of item 0 is int64 \[63\]; the model takes "
            r"batch\.seq_length=128 token ids\. Return whole numbers of shape \[128\], or "
            r"set batch\.seq_length=63\.",
        ),
        (
            words(target="rows:stream"),
            r"data\.target=rows:stream: the dataset could not be made: TypeError: object of type "
            r"'list_iterator' has no len\(\)\. Check data\.options",
        ),
        (
            words("data.options={count: 0}"),
            r"batch\.global_size=16: .* rows:build has 0: give more data\.",
        ),
        (
            words(target="planets:build"),
            r"data\.target=planets:build: no module planets is beside the recipe, in the current folder, or "
            r"installed\. Put planets\.py beside the recipe\.",
        ),
    ],
    ids=["row", "no length", "empty", "no module"],
)
def test_data_that_no_rank_could_take_are_refused_when_they_are_planned(
    given: Sequence[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan("quickstart", given[1:])


@pytest.mark.parametrize("site", ["site.container_image=train.sqsh", "site.python=/opt/python"])
def test_data_that_the_ranks_have_elsewhere_are_left_to_them(site: str) -> None:
    given = words("executor=slurm", f"+{site}", target="planets:build")
    assert make_plan("quickstart", given[1:]).plan.config.data.target == "planets:build"


def test_measuring_that_takes_too_long_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "pid"

    def out_of_time(process: Any, request: str, timeout: float) -> None:
        wait_until(lambda: started.exists() and started.read_text().endswith("\n"), "the child")
        raise subprocess.TimeoutExpired("measure", timeout)

    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nsleep 1000 & echo $! > '{started}'\nwait\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(subprocess.Popen, "communicate", out_of_time)
    message = (
        r"data\.target=rows:build: measuring took longer than 10 min.*, and was ended\. Do beforehand what "
        r"takes so long, such as a download\."
    )
    with pytest.raises(PlanError, match=message):
        make_plan("quickstart", words("data.options={count: 77}")[1:])
    wait_until(lambda: not birth_of(int(started.read_text())), "its end")


def test_a_process_that_ends_without_a_word_is_told_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.py").write_text(ROWS + "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    message = r"data\.target=rows:build: could not be measured: the process ended with status -9\.$"
    with pytest.raises(PlanError, match=message):
        make_plan("quickstart", words("data.options={count: 78}")[1:])
