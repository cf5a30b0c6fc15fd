"""Submitted runs on a real Slurm. A shell script stands in for the ranks."""

import math
import re
import shutil
import string
import subprocess
import sys

import pytest

from launcher.contract.site import SiteConfig, time_s
from launcher_plugins.executors.slurm.nodelist import expand
from launcher_plugins.executors.slurm.option_rules import KNOWN, PASSED_ON
from tests.helpers.slurm_cluster import TWO_BY_TWO
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.needs("slurm")


SPEAKS = """#!/bin/bash
# As some sites have it: a command of Slurm's that has more to say.
echo "Welcome to the cluster. Maintenance: 12 | 13 May."
{program} "$@"
code=$?
echo "3 jobs of yours are queued."
exit $code
"""


def test_a_job_runs_on_two_nodes_with_one_rendezvous_and_its_state_is_told(slurm):
    """Also where Slurm's commands print more than Slurm."""
    for name in ("sbatch", "squeue"):
        path = slurm.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SPEAKS.format(program=shutil.which(name)))
        path.chmod(0o755)
    slurm.environment["PATH"] = f"{path.parent}:{slurm.environment['PATH']}"
    _, job = slurm.submit(
        "sleep 0.1", "+site.options.comment='50% of \"it\" # $HOME; é'", "site.time_limit=90"
    )
    slurm.trireme("wait", "run")
    told = sorted(slurm.told())
    assert [words[:4] for words in told] == [
        [str(rank), str(rank % 2), "4", f"node{rank // 2}"] for rank in range(4)
    ]
    ((name, address),) = slurm.rendezvous()
    assert name == f"{job}.0"
    assert {words[4] for words in told} == {address}
    assert "succeeded" in slurm.trireme("status", "run")
    shown = slurm.ask("scontrol", "-o", "show", "job", job)
    assert 'Comment=50% of "it" # $HOME; é ' in shown
    assert " TimeLimit=01:30:00 " in shown


def test_a_time_is_what_slurm_reads_in_it(slurm):
    times = (
        "90",
        "90:30",
        "100:00:00",
        "3-00",
        "7-00:00",
        "2-12:30",
        "0-1:2:3",
        "00:00:00",
        "0",
        "UNLIMITED",
    )
    for time in times:
        words = ("--parsable", "--hold", "--partition=urgent", f"--time={time}", "--wrap=true")
        job = slurm.ask("sbatch", *words)
        (shown,) = re.findall(r" TimeLimit=(\S+)", slurm.ask("scontrol", "-o", "show", "job", job))
        slurm.ask("scancel", job)
        limit_s = SiteConfig(time_limit=time).time_limit_s
        whole_minutes_s = limit_s if math.isinf(limit_s) else -(-limit_s // 60) * 60
        assert (time, time_s(shown)) == (time, whole_minutes_s)


def test_every_option_of_this_sbatch_is_known_and_takes_the_values_that_it_may_be_given(slurm):
    text = slurm.ask("sbatch", "--help")
    for letter in string.ascii_lowercase:  # it lists those that begin so, also what its help leaves out
        text += slurm.refusal("sbatch", "--test-only", f"--{letter}")
    names = set(re.findall(r"(?<![\w-])--([a-z][a-z-]*[a-z])\b", text))
    assert names > {"account", "time-min", "wrap", "tasks-per-node"}
    assert names - KNOWN == set()
    assert len(names) > 90
    (slurm.folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=2\n")
    refused = []
    takes_some = {name: takes for name, takes in PASSED_ON.items() if takes.pattern != ".+"}
    for name, takes in sorted(takes_some.items()):
        if name not in names:  # of a later Slurm
            continue
        given = {value for value in (takes.example, *VALUES) if value != "true" and takes.allows(value)}
        words = [
            *(f"--{name}={value}" for value in sorted(given)),
            *([f"--{name}"] if takes.allows(True) else []),
        ]
        assert words, name
        refused += [
            word for word in words if BAD.search(slurm.refusal("sbatch", "--test-only", word, "job.sh"))
        ]
    assert refused == []
    sabotaged = slurm.refusal("sbatch", "--test-only", "--mincpus=0", "job.sh")
    assert BAD.search(sabotaged)


VALUES = (
    "0",
    "1",
    "70000",
    "1-2",
    "1,2",
    "1:2",
    "1-00",
    "x",
    "all",
    "none",
    "now",
    "16:00",
    "singleton",
    "1G",
)
BAD = re.compile(
    r"Invalid (?!generic|feature|license|time-min)|unrecognized|invalid|not valid|requires an|doesn't allow"
)
"""What sbatch says of a value that it cannot read."""


def test_names_that_a_shell_would_take_apart_stay_whole(slurm):
    recipe = slurm.folder / "my run copy.yaml"
    recipe.write_text(
        "defaults: [/base, override /data: shakespeare, _self_]\n"
        "batch: {global_size: 4, micro_size: 1, seq_length: 8}\n"
        "parallel: {pp: 2}\n"
    )
    name = 'a "b"; $(touch owned) `touch owned` #é 100%j'
    run, job = slurm.submit("sleep 0.1", recipe=str(recipe), run=name)
    slurm.trireme("wait", name)
    assert len((run / "told").read_text().splitlines()) == 4
    assert "trireme: job" in (run / "logs" / "executor.log").read_text()
    assert " JobName=my_run_copy " in slurm.ask("scontrol", "-o", "show", "job", job)
    assert not list(slurm.folder.rglob("owned*"))


def test_a_failed_rank_is_named_with_its_exit_code_though_srun_ends_the_others(slurm):
    slurm.submit('[ "$RANK" != 3 ] || exit 17; exec sleep 60')
    output = slurm.trireme("wait", "run", code=1)
    assert "rank 3 failed: ended with exit code 17\n" in output
    assert "rank 3 ended with exit code 17" in slurm.trireme("status", "run")


CONNECTED = f"""exec {sys.executable} - "$run" <<'PYTHON'
import json, os, pathlib, signal, sys, time
run, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
how, guilty = os.environ["HOW"], int(os.environ["GUILTY"])
(run / f"up-{{rank}}").touch()
while len(list(run.glob("up-*"))) < 4:
    time.sleep(0.02)
gone = run / "gone"
def fail(kind, message):
    record = {{"rank": rank, "time": time.time(), "error_type": kind, "message": message, "traceback": ""}}
    (run / "exit" / f"rank-{{rank}}.json").write_text(json.dumps(record))
    os._exit(1)
if rank == guilty:
    gone.touch()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    fail("out of memory", "DefaultCPUAllocator: can't allocate memory")
if how != "killed" and rank == (guilty + 1) % 4:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that saves: it is killed later
    time.sleep(60)
while not gone.exists():
    time.sleep(0.001)
fail("RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:30117")
PYTHON"""


@pytest.mark.parametrize(("guilty", "how"), [*((rank, "killed") for rank in range(4)), (3, "out of memory")])
def test_the_rank_that_is_the_cause_is_named_whoever_is_seen_to_end_first(slurm, how, guilty):
    """Those that lose their connection end at the same time; one that hears nothing is killed last."""
    slurm.submit(CONNECTED, f"+site.env.HOW='{how}'", f"+site.env.GUILTY='{guilty}'")
    output = slurm.trireme("wait", "run", code=1)
    ended = "killed by signal 9" if how == "killed" else "DefaultCPUAllocator"
    assert f"rank {guilty} failed: {ended}" in output
    assert f"rank {guilty}" in slurm.trireme("status", "run")


GONE = f"""exec {sys.executable} - "$run" <<'PYTHON'
import os, pathlib, signal, sys, time
from launcher.runtime.process.supervise import supervise
run, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def work():
    if rank in "01":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(4)  # longer than WaitTime, after which srun ends those that are left
    (run / f"done-{{rank}}").touch()
    return 0
sys.exit(supervise(work))
PYTHON"""


def test_ranks_that_a_run_can_lose_are_gone_alone(slurm):
    run, _ = slurm.submit(GONE)
    assert "succeeded" in slurm.trireme("wait", "run") + slurm.trireme("status", "run")
    assert sorted(path.name for path in run.glob("done-*")) == ["done-2", "done-3"]


def test_a_job_is_cancelled_with_its_ranks(slurm):
    _, job = slurm.submit("exec sleep 60")
    wait_until(lambda: len(slurm.told()) == 4)
    assert slurm.trireme("cancel", "run") == "cancelled\n"
    wait_until(
        lambda: slurm.ask("squeue", "--noheader", f"--jobs={job}", "--states=running,completing") == ""
    )


def test_a_bad_partition_is_refused_with_the_good_ones_and_nothing_is_queued(slurm):
    output = slurm.trireme("submit", *TWO_BY_TWO, "site.partition=gpu", "run.dir=run", code=2)
    assert (
        "Invalid partition name specified. Look at site.partition. Partitions here: batch, short, urgent.\n"
        in output
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
    slurm.trireme("wait", "run")  # it writes into its directory
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


def test_a_site_is_written_from_what_the_cluster_says_and_slurm_accepts_it(slurm):
    slurm.environment["XDG_CONFIG_HOME"] = str(slurm.folder)
    output = slurm.trireme("site", "init", "alps")
    assert (
        "partition batch (the default): 4 nodes of 16 CPUs and no GPU, jobs of at most 02:00:00\n" in output
    )
    assert "accepts this job" in slurm.trireme("site", "check", "alps")
    assert "Look at site.partition" in slurm.trireme("site", "check", "alps", "site.partition=gpu", code=2)


@pytest.mark.parametrize("text", ["a", "a,b", "a[1-3,07],b", "r[0-1]n[8-10]", "r[0-1]n[3]", "a[099-101]"])
def test_node_lists_are_read_as_slurm_reads_them(slurm, text):
    assert list(expand(text)) == slurm.ask("scontrol", "show", "hostnames", text).splitlines()
