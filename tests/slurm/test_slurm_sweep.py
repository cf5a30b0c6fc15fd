"""Sweeps on a real Slurm. A shell script stands in for the ranks."""

import re

import pytest

from tests.helpers.slurm_cluster import job_of
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.needs("slurm")


def run_sweep(slurm, does, *words):
    """Submits a sweep whose ranks do what a line of shell says; what was said, and the runs."""
    given = ("site=box", slurm.stand_in(does), "cluster.devices_per_node=2", "run.dir=sweep", *words)
    output = slurm.trireme("sweep", "run", "quickstart", *given, "--no-baseline")
    return output, sorted(slurm.folder.glob("sweep/[0-9]-*"))


def wait_for(slurm, runs):
    jobs = ",".join(map(job_of, runs))
    wait_until(lambda: not slurm.ask("squeue", "--noheader", f"--jobs={jobs}"))


def told(run):
    return [line.split() for line in (run / "told").read_text().splitlines()]


def test_four_points_are_one_array_of_which_the_failed_one_alone_is_run_again(slurm):
    does = '[[ $run != */2-* || -e $run/../mended ]] || exit 3; [ "$RANK" = 1 ] || sleep 1'
    words = ("parallel.schedule=gpipe,1f1b", "seed=1,2", "--at-once=4")
    output, runs = run_sweep(slurm, does, *words)
    (array,) = re.findall(r"submitted as the job array (\d+) of 4 tasks\n", output)
    assert [job_of(run) for run in runs] == [f"{array}_{task}" for task in range(4)]
    waited = slurm.trireme("wait", "sweep", code=1)
    assert waited.endswith("4 points: 3 succeeded, 1 failed\n  trireme sweep retry sweep\n")
    assert len({told(run)[0][4] for run in runs}) == 4, "the ranks of every point meet in a file of their own"
    assert all("trireme: job" in (run / "logs" / "executor.log").read_text() for run in runs)
    assert len(list(slurm.folder.rglob("source/lib"))) == 1
    status = slurm.trireme("sweep", "status", "sweep")
    assert "4 points: 3 succeeded, 1 failed\n" in status
    assert "schedule=1f1b seed=1: rank 0 ended with exit code 3\n" in status
    (runs[2].parent / "mended").touch()
    assert "1 point of 4 again, in sweep\n" in slurm.trireme("sweep", "retry", "sweep", "--no-baseline")
    assert "4 points: 4 succeeded\n" in slurm.trireme("wait", "sweep")
    assert [len(told(run)) for run in runs] == [2, 2, 4, 2]


def test_a_sweep_is_cancelled_as_a_whole_what_runs_and_what_waits(slurm):
    output, runs = run_sweep(slurm, "exec sleep 60", "seed=1,2,3", "parallel.pp=2", "--at-once=1")
    assert "of 3 tasks" in output
    wait_until(lambda: (runs[0] / "told").exists())
    slurm.trireme("cancel", str(runs[2]))
    assert "give one of them, such as sweep/0-seed_1." in slurm.trireme("logs", "sweep", code=2)
    assert slurm.trireme("cancel", "sweep") == "ended 2 points\n"
    wait_until(lambda: not slurm.ask("squeue", "--noheader"))
    assert "3 points: 3 cancelled\n" in slurm.trireme("sweep", "status", "sweep")
    assert slurm.trireme("cancel", "sweep") == "none of its points is going\n"


def test_points_of_other_nodes_are_jobs_of_their_own_one_after_the_other_on_one_machine(slurm):
    spread = ("cluster.nodes=1,2", "parallel.dp=auto", "cluster.allow_idle_devices=false")
    output, runs = run_sweep(slurm, "sleep 0.1", *spread)
    assert re.search(r"submitted as job \d+ on 1 node\nnodes=2: submitted as job \d+ on 2 nodes\n", output)
    second = slurm.ask("scontrol", "-o", "show", "job", job_of(runs[1]))
    assert f"Dependency=afterany:{job_of(runs[0])}" in second
    wait_for(slurm, runs)
    assert [len({words[3] for words in told(run)}) for run in runs] == [1, 2]
