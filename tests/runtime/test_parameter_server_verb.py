"""Parameter servers under torchrun: a worker that is killed is gone alone, where the run may go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import wait_until

SMALL = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_heads=2",
    "batch.seq_length=16",
    "batch.global_size=2",
    "batch.micro_size=1",
    "train.eval_batches=0",
    "report.warmup_steps=1",
    "parallel.pp=1",
    "parallel.dp=2",
    "architecture=parameter_server",
    "architecture.mode=async",
)


def worker_pid(run_dir: Path, rank: int) -> int:
    """The process of a rank that has torch: the child of the one that the process starter knows."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(f"{run_dir}/plan.json") in words and b"RANK=%d" % rank in variables:
            found.append(int(folder.name))
    _, child = sorted(found)
    return child


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="ranks are found through /proc")
def test_the_others_go_on_when_the_process_of_a_worker_is_killed(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning there was a little text, and it was repeated. " * 200)
    words = (f"data.source={text}", f"data.cache_dir={tmp_path}", "run.dir=mine", "train.num_steps=600")
    command = [sys.executable, "-m", "launcher", "run", "quickstart", *SMALL, *words, "--no-baseline"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        records = tmp_path / "mine" / "metrics" / "rank-00000.jsonl"
        wait_until(lambda: records.is_file() and records.read_text().count('"step"') > 10, "a step")
        os.kill(worker_pid(tmp_path / "mine", 0), signal.SIGKILL)
        output, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, error) == (0, "")
    assert "mine lost worker 0 after " in output
    assert (tmp_path / "mine" / "metrics" / "rank-00001.jsonl").read_text().count('"type":"step"') == 600
