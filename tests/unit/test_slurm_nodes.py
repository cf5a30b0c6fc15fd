"""The check of a job's nodes: what makes one unfit, and what the job script does then."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from launcher.base.errors import PlanError
from launcher.contract.alarms.events import read_events
from launcher.contract.job import JobState
from launcher.runs.render import render
from launcher_plugins.executors.slurm.nodes import needs, read_figures, unfit
from launcher_plugins.executors.slurm.state import with_end
from tests.helpers.slurm_stage import REQUEST, Stage

NODES = ("executor=slurm", "cluster.nodes=2", "cluster.devices_per_node=2", "parallel.dp=2")
SPARE = "cluster.spare_nodes=1"
FIT = {"clock_s": 100, "index": 0, "memory_bytes": 1e9, "matmul_flops": 1e11, "link_bytes_per_s": 1e9}
NEEDED = {"memory_bytes": 1e8, "min_speed": 0.5}


# What makes a node unfit


def reasons(*changes, needed=None):
    """Why nodes are unfit whose figures are those of a fit one, but for changes."""
    nodes = {f"n{number}": {**FIT, **change} for number, change in enumerate(changes)}
    return unfit(nodes, NEEDED | (needed or {}), seconds=(99, 101))


def test_nodes_that_have_what_they_need_are_fit():
    assert reasons({}, {}, {}) == {}


@pytest.mark.parametrize(
    ("change", "needed", "reason"),
    [
        ({"devices": 7}, {"devices": 8}, "too few CUDA devices: 7, and 8 are needed"),
        (
            {"memory_bytes": 9e7},
            {},
            "too little free memory: 90.0 MB, and 100 MB are needed",
        ),
        (
            {"device_memory_bytes": 1e9},
            {"device_memory_bytes": 2e9},
            "too little free memory on a device: 1.00 GB, and 2.00 GB are needed",
        ),
        (
            {"disk_bytes": 0},
            {"disk_bytes": 1e6},
            "too little room at the run directory: 0 B, and 1.00 MB are needed",
        ),
        (
            {"scratch_bytes": 5},
            {"scratch_bytes": 1e6},
            "too little room for temporary files (TMPDIR): 5 B, and 1.00 MB are needed",
        ),
        ({"clock_s": 40}, {}, "its clock is 59 s off that of the first node, and may be 5 s"),
        ({"clock_s": 3600}, {}, "its clock is 3499 s off that of the first node, and may be 5 s"),
        (
            {"matmul_flops": 4e10},
            {},
            "a matmul runs at 40 GFLOP/s, less than 0.5 of the median of all nodes, 100 GFLOP/s",
        ),
    ],
)
def test_a_node_that_lacks_something_is_unfit_and_the_reason_has_both_values(change, needed, reason):
    assert reasons({}, change, {}, needed=needed) == {"n1": reason}


@pytest.mark.parametrize(("off_s", "is_unfit"), [(-5, False), (-6, True), (5, False), (6, True)])
def test_a_clock_may_be_off_by_five_seconds(off_s, is_unfit):
    asked_and_told = (99, 101)
    clock_s = asked_and_told[off_s > 0] + off_s
    assert ("n1" in reasons({}, {"clock_s": clock_s}, {})) == is_unfit


def test_a_node_without_an_answer_and_one_that_is_not_done_in_time_are_unfit():
    late = {name: value for name, value in FIT.items() if name not in ("matmul_flops", "link_bytes_per_s")}
    found = unfit({"n0": FIT, "n1": {}, "n2": late}, NEEDED, seconds=(99, 101))
    assert found == {
        "n1": "gives no answer",
        "n2": "no matmul in time (executor.check_timeout_s; its error is in logs/executor.log)",
    }


@pytest.mark.parametrize(
    ("links", "slow"),
    [
        ((9, 9, 9), []),
        ((1, 1, 9, 9), ["n1"]),
        ((1, 9, 9), ["n0"]),
        ((9, 9, 1), ["n3"]),
        ((9, 1, 9), []),  # each end is fast with its other neighbour
        ((9, 1, 1, 9, 9, 1, 1, 9), ["n2", "n6"]),
        ((1,), []),  # nothing to compare it with
        ((None, None, 9, 9), ["n1"]),
        ((None, None), []),  # no network at all: the ranks will say more
    ],
)
def test_a_node_is_slow_at_exchanging_data_when_it_is_with_all_its_neighbours(links, slow):
    figures = [{"link_bytes_per_s": speed * 1e8} if speed else {} for speed in (*links, None)]
    nodes = {
        f"n{number}": {name: value for name, value in FIT.items() if name != "link_bytes_per_s"} | figure
        for number, figure in enumerate(figures)
    }
    found = unfit(nodes, NEEDED, seconds=(99, 101))
    assert sorted(found) == slow
    assert all("exchanges data with its neighbours at " in reason for reason in found.values())


def test_figures_are_read_in_the_order_of_the_check_among_what_else_is_printed():
    lines = ["n2 clock_s 7", "n1 clock_s 8", "Lmod: n1 is loaded", "n2 index 1", "n1 index 0", "n9 index 3"]
    assert list(read_figures(lines, ["n0", "n1", "n2"])) == ["n1", "n2", "n0"]


def test_what_a_node_needs_is_what_the_plan_predicts_of_its_ranks(make_plan):
    plan = make_plan(*NODES, "train.checkpoint_interval=10")
    found = needs(plan, 2)
    assert found["memory_bytes"] == max(
        sum(plan.memory[plan.rank(rank).coordinates.pp].total_bytes for rank in ranks)
        for ranks in ((0, 1), (2, 3))
    )
    assert found["disk_bytes"] == 12 * plan.num_parameters + 2**26
    assert needs(make_plan(*NODES), 2)["disk_bytes"] == 2**26


def test_of_gpus_a_node_needs_as_many_as_it_has_ranks_each_with_room_for_one(make_plan):
    plan = make_plan("executor=slurm", "device=h100", "cluster=dgx_h100", "parallel.dp=4")
    found = needs(plan, 8)
    assert found["devices"] == 8
    assert found["device_memory_bytes"] == max(part.total_bytes for part in plan.memory)


# What the job does


SRUN = """#!/bin/bash
# Runs the command once for each node of the list that answers, or of the job.
nodelist=$SLURM_JOB_NODELIST
while [[ $1 = --* ]]; do case $1 in --nodelist=*) nodelist=${1#*=} ;; esac; shift; done
export SLURM_NODEID=0 SLURM_LOCALID=0 SLURM_NTASKS=4
for node in ${nodelist//,/ }; do
  [ "$node" = "$SILENT" ] || SLURMD_NODENAME=$node SLURM_PROCID=$((number++)) "$@" || rc=$?
done
exit ${rc:-0}
"""
PYTHON = """#!/bin/bash
case $2 in
  launcher.runtime.measure.node_check)
    if [ "$SLURMD_NODENAME" = "$SLOW" ]; then speed=1e9; fi
    for figure in "index $SLURM_PROCID" "scratch_bytes 1e12" "disk_bytes ${{DISK:-1e12}}" \\
      "matmul_flops ${{speed:-1e11}}"; do echo "$SLURMD_NODENAME $figure"; done ;;
  launcher.runtime.process.main)
    echo "rank on $SLURMD_NODENAME" >>"$ASKED"
    if [ "$SLURMD_NODENAME" = "$LOST" ]; then
      echo "srun: error: Task launch for StepId=2.0 failed on node $LOST: Communication connection failure"
      echo "srun: error: Application launch failed: Communication connection failure"
      echo "srun: error: node0: task 0: Killed"
      exit 137
    fi >>"${{3%/*}}/logs/executor.log"
    if [ -n "$CRASHES" ] && [ ! -e "$ASKED.crashed" ]; then : >"$ASKED.crashed"; exit 1; fi ;;
  *) exec {python} "$@" ;;
esac
"""
SCONTROL = """#!/bin/bash
case $* in
  'show hostnames '*) tr , '\\n' <<<"$3" ;;
  *'show job'*)
    left=$SLURM_JOB_NODELIST
    if [ -e "$ASKED.crashed" ]; then left=$CRASHES; fi
    echo "JobId=1 JobState=RUNNING NodeList=$left ExcNodeList=${EXCLUDED-(null)} A=b" ;;
  *) echo "$*" >>"$ASKED" ;;
esac
"""


class Nodes(Stage):
    """A stage whose nodes are checked by the true judge, from made figures."""

    def __init__(self, folder, plan):
        super().__init__(folder, plan)
        self.write("srun", SRUN)
        self.write("python", PYTHON.format(python=shlex.quote(sys.executable)))
        self.write("scontrol", SCONTROL)
        self.total = plan.num_nodes

    def once(self, **variables):
        """The exit code of a start, and what it asked of Slurm and started."""
        asked = self.folder / "asked"
        nodelist = ",".join(f"node{number}" for number in range(self.total))
        given = {"SLURM_JOB_NODELIST": nodelist, "SLURM_JOB_NUM_NODES": str(self.total)}
        self.end(self.start(**{"ASKED": str(asked), "SILENT": "", "SLOW": "", **given, **variables}))
        return self.done.returncode, asked.read_text().splitlines() if asked.exists() else []

    def events(self):
        """What happened in the start, without its begin: the kind, the node, and what was done."""
        found = [(event.kind, event.node, event.done) for event in read_events(self.run_dir)]
        return [each for each in found if each[0] != "start"]

    def state(self):
        """How a failed job is told of."""
        with (self.run_dir / "logs" / "executor.log").open("a") as log:
            log.write(self.done.stdout + self.done.stderr)
        return with_end(JobState(phase="failed", exit_code=1), str(self.run_dir)).reason


@pytest.fixture
def nodes(make_plan, tmp_path):
    return lambda *overrides: Nodes(tmp_path, make_plan(*NODES, *overrides))


def test_fit_nodes_are_started_on_and_their_figures_are_kept(nodes):
    run = nodes()
    assert run.once() == (0, ["rank on node0", "rank on node1"])
    record = json.loads((run.run_dir / "exit" / "nodes.json").read_text())
    assert record["nodes"]["node1"]["matmul_flops"] == 1e11
    assert (record["unfit"], list(record["nodes"])) == ({}, ["node0", "node1"])


@pytest.mark.parametrize("how", ["SLOW", "SILENT"])
def test_an_unfit_node_is_named_and_its_job_starts_again_without_it(nodes, how):
    run = nodes("executor.min_node_speed=0.9")
    assert run.once(**{how: "node1"}) == (75, ["requeue 41", "update JobId=41 ExcNodeList=node1"])
    assert "trireme: node node1 is unfit: " in run.done.stdout
    assert (run.run_dir / "logs" / "unfit-nodes").read_text().startswith("node1 20")
    assert (run.run_dir / "logs" / "requeues").read_text() == "41.0\n"
    (kind, node, done), requeue = run.events()
    assert (kind, node) == ("unfit_node", "node1")
    assert done.startswith("node node1 is unfit: ")
    assert requeue == ("requeue", "", "job 41 after start 1")


def test_a_node_that_is_excluded_is_so_beside_those_that_were_before(nodes):
    run = nodes()
    _, asked = run.once(SILENT="node1", EXCLUDED="node[7-9]")
    assert asked[-1] == "update JobId=41 ExcNodeList=node[7-9],node1"


def test_a_spare_node_takes_the_place_of_an_unfit_one(nodes):
    assert nodes(SPARE).once(SLOW="node0") == (0, ["rank on node1", "rank on node2"])


def test_a_spare_node_that_is_not_needed_stays_idle(nodes):
    assert nodes(SPARE).once() == (0, ["rank on node0", "rank on node1"])


def test_after_a_crash_the_job_starts_again_on_the_nodes_that_are_left(nodes):
    run = nodes(SPARE, "train.checkpoint_interval=20")
    code, asked = run.once(CRASHES="node0,node2")
    assert (code, asked[-2:]) == (0, ["rank on node0", "rank on node2"])
    assert (run.run_dir / "logs" / "starts").read_text() == "41.0\n41.0.1\n"
    assert not (run.run_dir / "logs" / "failures").exists()


def test_after_a_crash_that_leaves_too_few_nodes_the_job_is_requeued_and_that_does_not_count(nodes):
    run = nodes(SPARE)
    code, asked = run.once(CRASHES="node0")
    assert (code, asked[-1]) == (75, "requeue 41")
    assert not (run.run_dir / "logs" / "requeues").exists()


def test_a_failure_on_nodes_that_are_all_there_is_no_crash(nodes):
    run = nodes(SPARE)
    code, _ = run.once(CRASHES="node0,node1,node2")
    assert code == 1
    assert (run.run_dir / "logs" / "failures").exists()


UNSTARTED = "node1 srun starts no rank on it: Communication connection failure"


@pytest.mark.parametrize("overrides", [(), ("executor.check_nodes=false",)])
def test_a_node_that_crashes_unseen_after_its_check_is_named_and_its_start_does_not_count(nodes, overrides):
    run = nodes(*overrides)
    code, asked = run.once(LOST="node1")
    assert (code, asked[2:]) == (75, ["requeue 41", "update JobId=41 ExcNodeList=node1"])
    assert f"trireme: node node1 is unfit: {UNSTARTED[6:]}\n" in run.done.stdout
    assert not (run.run_dir / "logs" / "requeues").exists()
    assert not (run.run_dir / "logs" / "failures").exists()
    assert [each[:2] for each in run.events()] == [("unfit_node", "node1"), ("requeue", "")]


def test_a_node_that_crashes_unseen_is_not_the_end_of_a_job_with_a_spare_one(nodes):
    run = nodes(SPARE)
    code, asked = run.once(LOST="node1")
    assert (code, asked[2:]) == (0, ["rank on node0", "rank on node2"])
    assert (run.run_dir / "logs" / "starts").read_text() == "41.0\n41.0.1\n"
    assert [each[:2] for each in run.events()] == [("unfit_node", "node1"), ("succeeded", "")]


def test_a_job_that_cannot_start_elsewhere_names_the_node_that_crashed_and_no_rank(nodes):
    run = nodes("executor.exclude_bad_nodes=false")
    assert run.once(LOST="node1")[0] == 1
    reason = f"too few nodes are fit: {UNSTARTED}"
    assert run.state() == reason
    assert run.events()[-1] == ("failed", "", f"job 41 ended with code 1: {reason}")


def test_the_failure_of_a_rank_is_not_put_down_to_a_node_that_crashed_in_an_earlier_start(nodes):
    run = nodes()
    run.once(LOST="node1")
    assert run.once(CRASHES="node0,node1", SLURM_RESTART_COUNT="1")[0] == 1
    assert (run.run_dir / "logs" / "failures").read_text() == "41.1\n"


def test_a_run_that_no_node_is_fit_for_fails_and_excludes_none(nodes):
    run = nodes()
    assert run.once(DISK="5") == (1, [])
    lacks = "too little room at the run directory: 5 B, and 67.1 MB are needed"
    reason = f"too few nodes are fit: node0 {lacks}; node1 {lacks}"
    assert run.done.stderr == f"trireme: {reason}\n"
    assert run.state() == reason


@pytest.mark.parametrize(
    "overrides",
    [("executor.exclude_bad_nodes=false",), ("executor.continuation=none",), ("executor.max_starts=1",)],
    ids=["not wanted", "nothing starts it again", "no start is left"],
)
def test_a_job_that_is_not_to_start_elsewhere_fails_by_the_name_of_the_node(nodes, overrides):
    run = nodes(*overrides)
    assert run.once(SILENT="node1") == (1, [])
    assert run.state() == "too few nodes are fit: node1 gives no answer"


def test_the_next_jobs_of_a_chain_do_not_get_an_unfit_node(nodes):
    run = nodes("executor.continuation=chain", "train.checkpoint_interval=20")
    (run.run_dir / "logs").mkdir()
    (run.run_dir / "logs" / "chain").write_text("41\n42\n43\n")
    excluded = [f"update JobId={job} ExcNodeList=node1" for job in (42, 43)]
    assert run.once(SILENT="node1") == (75, excluded)
    (run.run_dir / "logs" / "chain").write_text("40\n41\n")
    assert run.once(SILENT="node1")[0] == 1


def test_a_clock_that_is_off_is_compared_with_the_first_nodes(nodes):
    run = nodes()
    run.write(
        "date", '#!/bin/bash\n[ "$SLURMD_NODENAME$*" = "node1+%s" ] && echo 5000 || exec /bin/date "$@"'
    )
    code, _ = run.once()
    assert code == 75
    assert " s off that of the first node, and may be 5 s\n" in run.done.stdout


def test_nodes_that_cannot_be_judged_end_the_job(nodes):
    run = nodes()
    run.write("python", '#!/bin/bash\n[ "$1" != -ISc ] || exec python3 "$@"\nexit 3\n')
    assert run.once()[0] == 1
    assert "executor.check_nodes=false starts it without that\n" in run.done.stderr


# What may be chosen, and what is told of it


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("executor.check_nodes=false", SPARE),
            r"cluster\.spare_nodes=1: spare nodes take the place of those that fail the check of nodes\. "
            r"Set executor\.check_nodes=true, or cluster\.spare_nodes=0\.",
        ),
        (
            ("executor=torchrun", "cluster.nodes=1", "cluster.devices_per_node=4", SPARE),
            r"cluster\.spare_nodes=1: starts ranks on this machine only, which has no spare nodes\. "
            r"Set cluster\.spare_nodes=0\.",
        ),
    ],
)
def test_spare_nodes_that_could_not_be_used_are_refused(make_plan, overrides, message):
    with pytest.raises(PlanError, match=message):
        render(make_plan(*NODES, *overrides), Path(REQUEST.run_dir))


def test_a_job_with_spare_nodes_asks_for_them_and_survives_a_crash(make_plan):
    plan = make_plan(*NODES, SPARE)
    text = render(plan, Path(REQUEST.run_dir)).text
    assert "#SBATCH --nodes=3\n#SBATCH --no-kill\n" in text
    assert plan.num_nodes == 3
    assert any(
        note == "3 nodes are reserved: 1 of them for nodes that fail the check before a start, or crash "
        "(cluster.spare_nodes)."
        for note in plan.notes
    )


def test_a_job_without_spare_nodes_is_slurms_to_end_when_one_crashes(make_plan):
    assert "no-kill\n" not in render(make_plan(*NODES), Path(REQUEST.run_dir)).text
