"""Submitted runs on a real Slurm. A shell script stands in for the ranks, except in one test."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.topology.nodelist import expand

pytestmark = pytest.mark.needs("slurm")
REPOSITORY = Path(__file__).resolve().parents[2]
TWO_BY_TWO = ("site=box", "cluster.nodes=2", "cluster.devices_per_node=2", "parallel.dp=2")
RANK = """#!/bin/bash
# Stands in for a rank: python -m launcher.runtime.main RUN/plan.json --sha256 HEX
run=$(dirname "$3")
echo "$RANK $LOCAL_RANK $WORLD_SIZE $(hostname) $MASTER_ADDR:$MASTER_PORT" >>"$run/told"
{does}
"""


class Slurm:
    """The commands of the cluster, and the launcher in a folder of its own."""

    def __init__(self, folder, variables):
        self.folder = folder
        self.environment = {**os.environ, **variables}
        self.launcher = [sys.executable, "-m", "launcher"]

    def ask(self, *words):
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def trireme(self, *words, code=0):
        """The output of a verb that ends with an exit code."""
        done = subprocess.run(
            [*self.launcher, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, does, *overrides):
        """Submits a job whose ranks do what a line of shell says; its run directory and its id."""
        stand_in = self.folder / "rank"
        stand_in.write_text(RANK.format(does=does))
        stand_in.chmod(0o755)
        words = ("submit", "quickstart", *TWO_BY_TWO, f"site.python={stand_in}", "run.dir=run", *overrides)
        self.trireme(*words)
        return self.folder / "run", json.loads((self.folder / "run" / "handle.json").read_text())["id"]

    def told(self):
        path = self.folder / "run" / "told"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def rendezvous(self):
        """The rendezvous of every start of the job, as its output tells."""
        log = self.folder / "run" / "logs" / "executor.log"
        return re.findall(r": rendezvous (\S+) at (\S+)", log.read_text()) if log.exists() else []


@pytest.fixture
def slurm(cluster, tmp_path):
    return Slurm(tmp_path, cluster)


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)


def test_a_job_runs_on_two_nodes_with_one_rendezvous_and_its_state_is_told(slurm):
    _, job = slurm.submit("sleep 0.1", "+site.options.comment='50% of \"it\" # $HOME; é'")
    slurm.trireme("wait", "run")
    told = sorted(slurm.told())
    assert [words[:4] for words in told] == [
        [str(rank), str(rank % 2), "4", f"node{rank // 2}"] for rank in range(4)
    ]
    ((name, address),) = slurm.rendezvous()
    assert name == f"{job}.0"
    assert {words[4] for words in told} == {address}
    assert "succeeded" in slurm.trireme("status", "run")
    assert 'Comment=50% of "it" # $HOME; é ' in slurm.ask("scontrol", "-o", "show", "job", job)


def test_a_failed_rank_is_named_with_its_exit_code_though_srun_ends_the_others(slurm):
    slurm.submit('[ "$RANK" != 3 ] || exit 17; sleep 60')
    output = slurm.trireme("wait", "run", code=1)
    assert "rank 3 failed: ended with exit code 17\n" in output
    assert "rank 3 ended with exit code 17" in slurm.trireme("status", "run")


def test_a_job_is_cancelled_with_its_ranks(slurm):
    _, job = slurm.submit("exec sleep 60")
    wait_until(lambda: len(slurm.told()) == 4)
    assert slurm.trireme("cancel", "run") == "cancelled\n"
    wait_until(
        lambda: slurm.ask("squeue", "--noheader", f"--jobs={job}", "--states=running,completing") == ""
    )


def test_a_requeued_job_keeps_its_directory_and_gets_another_rendezvous(slurm):
    run, job = slurm.submit('[ -e "$run/second" ] || exec sleep 60')
    wait_until(lambda: len(slurm.told()) == 4)
    (run / "second").touch()
    (run / "exit" / "rank-0.json").write_text("{}")
    slurm.ask("scontrol", "requeue", job)
    slurm.trireme("wait", "run")
    first, second = slurm.rendezvous()
    assert [first[0], second[0]] == [f"{job}.0", f"{job}.1"]
    assert first[1] != second[1]
    assert len(slurm.told()) == 8
    assert [path.name for path in (run / "exit").iterdir()] == ["job.json"]


def test_a_bad_partition_is_refused_with_the_good_ones_and_nothing_is_queued(slurm):
    output = slurm.trireme("submit", *TWO_BY_TWO, "site.partition=gpu", "run.dir=run", code=2)
    assert (
        "Invalid partition name specified. Look at site.partition. Partitions here: batch, short.\n" in output
    )
    assert not (slurm.folder / "run").exists()


def test_submitting_from_inside_an_allocation_takes_nothing_of_it_along(slurm):
    slurm.environment |= {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_CPUS_PER_TASK": "99",
        "SLURM_NTASKS": "1",
    }
    slurm.submit('[ "$WORLD_SIZE" = 4 ] && [ -z "$SLURM_CPUS_PER_TASK" ]')
    slurm.trireme("wait", "run")
    assert len(slurm.told()) == 4


def test_a_dry_run_prints_what_ran(slurm):
    run, job = slurm.submit("true")
    shutil.rmtree(run)
    words = ("submit", *TWO_BY_TWO, f"site.python={slurm.folder}/rank", "run.dir=run", "--dry-run")
    done = subprocess.run(
        [*slurm.launcher, *words],
        cwd=slurm.folder,
        env=slurm.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == slurm.ask("scontrol", "write", "batch_script", job, "-") + "\n"


@pytest.mark.parametrize("text", ["a", "a,b", "a[1-3,07],b", "r[0-1]n[8-10]", "r[0-1]n[3]", "a[099-101]"])
def test_node_lists_are_read_as_slurm_reads_them(slurm, text):
    assert list(expand(text)) == slurm.ask("scontrol", "show", "hostnames", text).splitlines()


SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=2",
    "batch.seq_length=16",
    "batch.global_size=4",
    "batch.micro_size=1",
    "train.num_steps=4",
    "train.eval_batches=0",
    "report.warmup_steps=1",
)


def test_a_queued_run_trains_although_the_tree_that_it_came_from_is_broken(slurm):
    """The one test with real ranks: two nodes of two, submitted from a copy of the tree."""
    tree = slurm.folder / "tree"
    for name in ("launcher", "conf", "recipes", "slurm"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPOSITORY / "plugins", tree, dirs_exist_ok=True)
    text = slurm.folder / "text.txt"
    text.write_text("In the beginning there was a little text, and it was repeated. " * 200)
    slurm.environment |= {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    data = (f"data.source={text}", f"data.cache_dir={slurm.folder}/cache", "report.baseline=none")
    hold = ("+site.options.hold=true", "executor.starter=torchrun")
    rank = tree / "launcher" / "runtime" / "rank.py"
    rank.write_text(rank.read_text() + "\nprint('the tree as it was')\n")
    slurm.trireme("submit", "quickstart", *TWO_BY_TWO, *SMALL, *data, *hold, "run.dir=run")
    for module in (tree / "launcher" / "runtime").glob("*.py"):
        module.write_text("raise SystemExit('the broken tree was used')\n")
    assert "waits: JobHeldUser" in slurm.trireme("status", "run")
    job = json.loads((slurm.folder / "run" / "handle.json").read_text())["id"]
    slurm.ask("scontrol", "release", job)
    output = slurm.trireme("wait", "run")
    assert "step 4/4" in output
    assert "the tree as it was\n" in slurm.trireme("logs", "run", "--rank", "3")
    assert len(list((slurm.folder / "run" / "metrics").glob("rank-*.jsonl"))) == 4
    assert "4/4" in slurm.trireme("status", "run")
