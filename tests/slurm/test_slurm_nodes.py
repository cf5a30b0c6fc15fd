"""Nodes that are unfit or crash, on a real Slurm: they are named, and the run goes on without them."""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.slurm_cluster import SAVES, job_of
from tests.helpers.waiting import wait_until
from tests.slurm.test_slurm_life import SMALL

pytestmark = pytest.mark.needs("slurm")

CHECKED = ("executor.check_nodes=true", "executor.min_node_speed=0.1")
"""This machine's own load makes its nodes differ."""
SPARE = "cluster.spare_nodes=1"
SLOWED = """
import os, time
if os.environ.get("SLURMD_NODENAME") == "node1":
    clock = time.perf_counter
    time.perf_counter = lambda: 50 * clock()
"""


@contextmanager
def full_disk(slurm, node, folder):
    """A file system without room at a folder of a node."""
    first = Path(slurm.environment["CLUSTER"], "run", f"namespace-{node}.pid").read_text().strip()
    init = subprocess.check_output(["pgrep", "-P", first], text=True).strip()
    within = ["nsenter", "--mount", f"--target={init}"]
    subprocess.run([*within, "mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run([*within, "umount", folder], check=True)


def weights(run, step):
    return (run / "checkpoints" / f"step-{step:08}" / "shard-00000.safetensors").read_bytes()


def test_a_spare_node_takes_the_place_of_one_with_a_full_disk_and_then_of_one_that_crashes(slurm):
    """With real ranks, beside the same run undisturbed."""
    text, scratch = slurm.folder / "text.txt", slurm.folder / "scratch"
    text.write_text("In the beginning there was a little text, and it was repeated. " * 200)
    scratch.mkdir()
    data = (f"data.source={text}", f"data.cache_dir={slurm.folder}/cache", "train.num_steps=500")
    words = (
        "site=box",
        "cluster.nodes=2",
        "cluster.devices_per_node=1",
        "parallel.pp=1",
        "parallel.dp=2",
        *SMALL,
        *data,
    )
    saves = ("train.checkpoint_interval=20", "--no-baseline", *CHECKED)
    run, other = slurm.folder / "run", slurm.folder / "undisturbed"
    with full_disk(slurm, "node1", scratch):
        slurm.trireme("submit", "quickstart", *words, *saves, f"site.scratch={scratch}", SPARE, "run.dir=run")
        wait_until((run / "checkpoints" / "step-00000020").exists)
    log = run / "logs" / "executor.log"
    assert "trireme: node node1 is unfit: too little room for temporary files (TMPDIR): " in log.read_text()
    slurm.run_cluster("crash", "node2")
    slurm.ask("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=crashed")  # else seen after 25 s
    try:
        slurm.trireme("submit", "quickstart", *words, *saves, "site.exclude=node2", "run.dir=undisturbed")
        slurm.trireme("wait", "run")
    finally:
        slurm.run_cluster("revive", "node2")
    slurm.trireme("wait", "undisturbed")
    assert "trireme: nodes have crashed: node[0-1] are left of node[0-2]\n" in log.read_text()
    assert (run / "logs" / "starts").read_text() == f"{job_of(run)}.0\n{job_of(run)}.0.1\n"
    assert not (run / "logs" / "requeues").exists()
    assert weights(run, 500) == weights(other, 500)
    assert weights(run, 500) != weights(other, 480)


def test_a_slow_node_is_named_and_the_job_starts_again_on_others(slurm):
    (slurm.folder / "sitecustomize.py").write_text(SLOWED)
    run, job = slurm.submit("true", SAVES, *CHECKED, f"+site.env.PYTHONPATH='{slurm.folder}'")
    slurm.trireme("wait", "run")
    log = (run / "logs" / "executor.log").read_text()
    assert "trireme: node node1 is unfit: a matmul runs at " in log
    assert f"trireme: job {job} does not get node1 again" in log
    assert "node1" not in {words[3] for words in slurm.told()}
    assert (run / "logs" / "starts").read_text() == f"{job}.0\n{job}.1\n"
    assert "ExcNodeList=node1 " in slurm.ask("scontrol", "--oneliner", "show", "job", job)
