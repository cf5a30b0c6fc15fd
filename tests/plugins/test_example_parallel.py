"""A parallel plugin from a distribution of its own: checked, planned, run on two ranks, resumed on one."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.configs import SMALL_RUN

EXAMPLE = Path(__file__).parent / "example_parallel"
SMALL = (
    *SMALL_RUN,
    "train.num_steps=6",
    "train.keep_checkpoints=9",
    "train.checkpoint_interval=2",
    "report.baseline=none",
    "data=text",
    "data.source=text.txt",
    "data.cache_dir=cache",
    "parallel.pp=1",
)
NAMED = "parallel.plugins={sharded_adamw:{bucket_view:true}}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed distribution, beside a text to train on."""
    folder = tmp_path_factory.mktemp("example")
    source = shutil.copytree(EXAMPLE, folder / "source")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(folder / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    (folder / "text.txt").write_text("In the beginning there was a little text, and it was repeated. " * 200)
    return folder


def trireme(folder: Path, *words: str, site: str = "site") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder / site)}
    command = [sys.executable, "-m", "launcher", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def planned(folder: Path, *words: str, site: str = "site") -> subprocess.CompletedProcess[str]:
    return trireme(folder, "plan", "quickstart", *SMALL, *words, site=site)


def losses(run: Path) -> Sequence[float]:
    lines = (run / "metrics" / "rank-00000.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["type"] == "step"]


def test_a_plan_shows_its_memory_and_its_messages(installed: Path) -> None:
    text = planned(installed, "parallel.dp=2", NAMED).stdout
    assert "Optimizer state per rank\n" in text
    assert "in place of" in text
    assert "updated weights" in text
    sizes = [
        re.search(r"Memory per rank.*?\n  optimizer +([\d.]+) [KM]B", shown, re.DOTALL)
        for shown in (text, planned(installed, "parallel.dp=2").stdout)
    ]
    split, whole = (float(found[1]) for found in sizes if found)
    assert split == pytest.approx(whole / 2, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.dp=1", NAMED], "has no effect here: it does not apply to this configuration"),
        (["parallel.dp=2", NAMED, "precision=bf16"], "splits the moments of fp32 weights"),
        (
            ["parallel.dp=2", NAMED, "parallel.zero_stage=1"],
            "zero and sharded_adamw would each make the update",
        ),
        (
            ["parallel.dp=2", "parallel.plugins={sharded_adamw:{buckets:2}}"],
            "parallel.plugins.sharded_adamw.buckets=2: not a setting here. Known: bucket_view.",
        ),
        (
            ["parallel.dp=2", "parallel.plugins={sharded:{}}"],
            "no parallel of that name is installed. Did you",
        ),
    ],
    ids=["one replica", "bf16", "two updates", "unknown option", "unknown name"],
)
def test_what_it_cannot_do_is_refused(installed: Path, words: list[str], message: str) -> None:
    done = planned(installed, *words)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())


def test_it_takes_part_only_where_it_is_named(installed: Path) -> None:
    assert "Optimizer state per rank" not in planned(installed, "parallel.dp=2").stdout
    elsewhere = planned(installed, "parallel.dp=2", NAMED, site="nowhere")
    assert "no parallel of that name is installed" in " ".join(elsewhere.stderr.split())


def test_two_ranks_train_as_one_device_and_go_on_without_it(installed: Path) -> None:
    def run(*words: str) -> None:
        done = trireme(installed, "run", "quickstart", *SMALL, *words)
        assert done.returncode == 0, done.stderr

    run("parallel.dp=1", "run.dir=alone")
    run("parallel.dp=2", NAMED, "run.dir=shared")
    expected = losses(installed / "alone")
    assert losses(installed / "shared") == pytest.approx(expected, rel=2e-5)
    assert "dp=2 tp=1 pp=1 sharded_adamw" in trireme(installed, "report", "shared").stdout
    (installed / "shared" / "status.json").write_text('{"phase": "failed"}')
    shutil.rmtree(installed / "shared" / "checkpoints" / "step-00000006")
    run("parallel.dp=1", "run.dir=shared", "--resume")
    assert losses(installed / "shared") == pytest.approx(expected[4:], rel=2e-5)
