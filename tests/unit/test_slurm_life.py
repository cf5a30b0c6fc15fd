"""The life of a run on Slurm: told to end, saved, started again, given up; with stand-ins for Slurm."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base import lock
from launcher.base.errors import ConfigError, PlanError
from launcher.contract.alarms.events import EVENTS, Event, append, read_events
from launcher.runs.render import render
from launcher_plugins.executors.slurm.continuation import lead_warnings
from launcher_plugins.executors.slurm.executor import Slurm
from tests.helpers.prometheus_text import samples_of
from tests.helpers.slurm_cluster import REPOSITORY
from tests.helpers.slurm_stage import REQUEST, TWO_BY_TWO, Stage
from tests.helpers.waiting import wait_until

SAVES = ("train.checkpoint_interval=20",)
CHAIN = ("executor.continuation=chain", "executor.max_starts=3")
SRUN = """#!/bin/bash
# Becomes rank 0, so that what is sent to it reaches the rank.
while [[ $1 = --* ]]; do shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 exec "$@"
"""
RANK = """#!{python}
# A rank that saves when it is told to end; it tells how often it was, and ends with RANK_CODE.
import json, os, pathlib, signal, sys, time
if sys.argv[2] != "launcher.runtime.process.main":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
run, told = pathlib.Path(sys.argv[3]).parent, []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
(run / "pid").write_text(str(os.getpid()))
(run / "up").write_text(" ".join(sys.argv[4:]))
while not told and "FAILS" not in os.environ:
    time.sleep(0.01)
if told:
    time.sleep(0.2)
    (run / "exit" / "stopped.json").write_text(json.dumps({{"step": 3, "signal": "SIGUSR1"}}))
sys.exit(int(os.environ.get("RANK_CODE", "0")))
"""
STARTING = """#!/bin/bash
# Imports a big library.
: >"$(dirname "$3")/up"
sleep 0.5
exec awake "$@"
"""
SCONTROL = """#!/bin/bash
case "$*" in
  'show hostnames node[7-8]') printf 'node7\\nnode8\\n' ;;
  "--oneliner show job "$SLURM_JOB_ID*)
    if [ -n "$END" ] && grep -qs requeue "$ASKED"; then JOB_STATE=PENDING; fi
    times="EndTime=${END:-Unknown} PreemptTime=${PREEMPTED:-None}"
    echo "JobId=1 JobState=${JOB_STATE:-RUNNING} Reason=No $times A=b" ;;
  *) echo "$*" >>"$ASKED" ;;
esac
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"$ASKED"
"""


class Life(Stage):
    """A stage on which signals come and several starts follow each other."""

    def __init__(self, folder, plan):
        super().__init__(folder, plan)
        self.write("srun", SRUN)
        self.write("python", RANK.format(python=shlex.quote(sys.executable)))
        self.write("scontrol", SCONTROL)
        self.write("scancel", SCANCEL)
        (self.run_dir / "logs").mkdir()

    def once(self, *signals, **variables):
        """One start, to which signals come when the ranks are there; its exit code."""
        process = self.start(ASKED=str(self.folder / "asked"), **variables)
        up = self.run_dir / "up"
        if signals:
            wait_until(up.exists)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.05)
        self.end(process)
        up.unlink(missing_ok=True)
        return self.done.returncode

    def asked(self):
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def life(make_plan, tmp_path):
    def prepare(*overrides):
        return Life(tmp_path, make_plan(*TWO_BY_TWO, *SAVES, *overrides))

    return prepare


@pytest.mark.parametrize("signals", [(signal.SIGUSR1,), (signal.SIGTERM,), (signal.SIGTERM, signal.SIGUSR1)])
def test_whatever_signals_come_the_ranks_save_and_the_job_is_requeued_once(life, signals):
    run = life()
    assert run.once(*signals) == 75
    assert run.asked() == ["requeue 41"]
    assert run.record() == '{"job": "41", "exit_code": 75}\n'


def test_a_task_of_an_array_goes_by_its_own_id_not_by_that_of_the_array(life):
    run = life()
    array = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "3"}
    assert run.once(signal.SIGUSR1, **array) == 75
    assert run.asked() == ["requeue 41_3"]
    assert run.record() == '{"job": "41_3", "exit_code": 75}\n'


def test_a_rank_that_is_still_starting_is_told_again(life):
    run = life()
    run.write("awake", RANK.format(python=shlex.quote(sys.executable)))
    run.write("python", STARTING)
    assert run.once(signal.SIGUSR1) == 75
    assert run.asked() == ["requeue 41"]


@pytest.mark.parametrize("code", ["1", "143"])
def test_ranks_that_saved_have_not_failed_whatever_srun_says(life, code):
    run = life()
    assert run.once(signal.SIGUSR1, RANK_CODE=code) == 75
    assert run.asked() == ["requeue 41"]
    assert not (run.run_dir / "logs" / "failures").exists()


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "CANCELLED"])
def test_a_job_that_slurm_has_requeued_or_cancelled_is_left_to_it(life, state):
    run = life()
    assert run.once(signal.SIGTERM, JOB_STATE=state) == 75
    assert run.asked() == []
    assert f"trireme: leaves job 41 to Slurm, where it is {state}\n" in run.done.stdout


def test_ranks_that_end_because_slurm_takes_the_job_away_have_not_failed(life):
    run = life()
    assert run.once(FAILS="", RANK_CODE="143", JOB_STATE="COMPLETING") == 75
    assert not (run.run_dir / "logs" / "failures").exists()


def test_ranks_that_end_because_their_job_gives_way_to_another_have_not_failed(life):
    run = life()
    assert run.once(FAILS="", RANK_CODE="143", PREEMPTED="2026-01-02T03:04:05") == 75
    assert run.asked() == ["requeue 41"]
    assert not (run.run_dir / "logs" / "failures").exists()


def test_ranks_that_were_told_too_early_to_save_have_not_failed(life):
    run = life()
    run.write("python", '#!/bin/bash\n: >"$(dirname "$3")/up"; sleep 0.5; exit 1\n')
    assert run.once(signal.SIGTERM) == 75
    assert run.asked() == ["requeue 41"]


def test_a_run_that_is_cut_three_times_goes_on_in_the_same_directory_until_no_start_is_left(life):
    run = life("executor.max_starts=3")
    for restart in range(3):
        assert run.once(signal.SIGUSR1, SLURM_RESTART_COUNT=str(restart)) == 75
    assert run.asked() == ["requeue 41"] * 2
    assert "not requeued after start 3: 3 of at most 3 count (executor.max_starts)\n" in run.done.stdout
    assert (run.run_dir / "logs" / "starts").read_text() == "41.0\n41.1\n41.2\n"
    assert sorted(path.name for path in run.run_dir.glob("exit*")) == ["exit", "exit.41.0", "exit.41.1"]


@pytest.mark.parametrize(
    "variables",
    [{"PREEMPTED": "2026-01-02T03:04:05"}, {"JOB_STATE": "PENDING"}],
    ids=["gives way", "requeued by Slurm or an operator"],
)
def test_what_slurm_takes_away_is_not_a_start_that_counts(life, variables):
    run = life("executor.max_starts=2")
    for restart in range(3):
        assert run.once(signal.SIGUSR1, SLURM_RESTART_COUNT=str(restart), **variables) == 75
    assert not (run.run_dir / "logs" / "requeues").exists()
    before = len(run.asked())
    assert run.once(signal.SIGUSR1, SLURM_RESTART_COUNT="3") == 75
    assert run.asked()[before:] == ["requeue 41"]
    assert (run.run_dir / "logs" / "requeues").read_text() == "41.3\n"


def crash(run, restart):
    """A start whose node is lost, with the script on it."""
    process = run.start(ASKED=str(run.folder / "asked"), SLURM_RESTART_COUNT=str(restart))
    wait_until((run.run_dir / "up").exists)
    (run.run_dir / "up").unlink()
    for pid in (process.pid, int((run.run_dir / "pid").read_text())):
        os.kill(pid, signal.SIGKILL)
    run.end(process)


def save(run, step):
    (run.run_dir / "checkpoints" / f"step-{step:08}").mkdir(parents=True, exist_ok=True)


def test_a_run_that_nodes_end_each_time_before_it_saves_anything_has_failed(life):
    run = life("executor.max_node_failures=3", "executor.max_starts=2", "executor.save_lead_s=0")
    for restart in range(3):
        crash(run, restart)
    assert run.once(SLURM_RESTART_COUNT="3") == 1
    said = (
        "3 starts in a row were ended by their nodes, and nothing more was saved "
        "(executor.max_node_failures); nodes that were seen to fail are in logs/unfit-nodes"
    )
    assert run.done.stderr == f"trireme: {said}\n"
    assert read_events(run.run_dir)[-1].done == f"job 41 ended with code 1: {said}"
    assert not (run.run_dir / "up").exists()


def test_crashes_of_nodes_between_which_a_checkpoint_is_saved_do_not_add_up(life):
    run = life("executor.max_node_failures=2", "executor.save_lead_s=0")
    for restart in range(4):
        save(run, restart + 1)
        crash(run, restart)
    save(run, 5)
    assert run.once(signal.SIGUSR1, SLURM_RESTART_COUNT="4") == 75


@pytest.mark.parametrize(
    "variables",
    [{}, {"PREEMPTED": "2026-01-02T03:04:05", "FAILS": "", "RANK_CODE": "143"}],
    ids=["own", "gives way"],
)
def test_starts_that_the_run_itself_or_a_preemption_has_ended_are_no_failures_of_nodes(life, variables):
    run = life("executor.max_node_failures=1", "executor.max_restarts=7")
    for restart in range(3):
        signals = () if variables else (signal.SIGUSR1,)
        assert run.once(*signals, SLURM_RESTART_COUNT=str(restart), **variables) == 75
    assert run.once(FAILS="", RANK_CODE="17", SLURM_RESTART_COUNT="3") == 17
    assert run.once(signal.SIGUSR1, SLURM_RESTART_COUNT="4") == 75


def test_a_job_that_fails_each_time_has_three_attempts_when_it_is_given_three(life):
    run = life(*SAVES, "executor.max_restarts=2")
    codes = [run.once(FAILS="", RANK_CODE="17", SLURM_RESTART_COUNT=str(restart)) for restart in range(3)]
    assert codes == [17] * 3
    assert run.asked() == ["requeue 41"] * 2


def test_a_failed_start_is_not_made_again_unless_asked_for(life):
    run = life()
    assert run.once(FAILS="", RANK_CODE="17") == 17
    assert run.asked() == []


def test_a_job_of_a_chain_ends_unfinished_and_the_next_goes_on(life):
    run = life(*CHAIN)
    assert run.once(signal.SIGUSR1) == 75
    (run.run_dir / "checkpoints" / "step-00000003").mkdir(parents=True)
    process = run.start(SLURM_JOB_ID="42")
    wait_until((run.run_dir / "up").exists)
    process.send_signal(signal.SIGUSR1)
    run.end(process)
    assert (run.run_dir / "up").read_text().endswith("--resume")
    assert (run.run_dir / "exit.41.0" / "stopped.json").exists()
    assert run.asked() == []


def test_a_chain_that_fails_cancels_its_other_jobs_and_none_starts_any_more(life):
    run = life(*CHAIN)
    (run.run_dir / "logs" / "chain").write_text("41\n42\n43\n")
    assert run.once(FAILS="", RANK_CODE="17") == 17
    assert run.asked() == ["scancel --quiet 43", "scancel --quiet 42"]
    assert run.once(SLURM_JOB_ID="42") == 1
    assert "the run has already failed (executor.max_restarts=0)\n" in run.done.stderr
    assert not (run.run_dir / "up").exists()


def test_a_chain_that_is_finished_cancels_its_other_jobs_and_one_that_starts_all_the_same_does_nothing(life):
    run = life(*CHAIN)
    (run.run_dir / "logs" / "chain").write_text("40\n41\n42\n43\n")
    assert run.once(FAILS="") == 0
    assert run.asked() == ["scancel --quiet 43", "scancel --quiet 42"]
    assert run.once(SLURM_JOB_ID="43") == 0
    assert run.done.stdout == "trireme: the run is finished, so job 43 has nothing to start\n"
    assert run.record() == '{"job": "41", "exit_code": 0}\n'
    assert (run.run_dir / "logs" / "starts").read_text() == "41.0\n"


def test_a_run_whose_ranks_are_told_to_end_in_their_last_save_is_finished(life):
    run = life("train.num_steps=60")
    run.write("python", '#!/bin/bash\n: >"$(dirname "$3")/up"; sleep 0.5; exit 138\n')
    (run.run_dir / "checkpoints" / "step-00000060").mkdir(parents=True)
    assert run.once(signal.SIGUSR1) == 0
    assert run.asked() == []


def test_a_run_that_is_told_to_end_before_its_last_save_is_not_finished(life):
    run = life("train.num_steps=60")
    run.write("python", '#!/bin/bash\n: >"$(dirname "$3")/up"; sleep 0.5; exit 138\n')
    (run.run_dir / "checkpoints" / "step-00000060.unfinished").mkdir(parents=True)
    assert run.once(signal.SIGUSR1) == 75
    assert run.asked() == ["requeue 41"]


def test_ranks_that_fail_after_their_last_save_have_failed(life):
    run = life("train.num_steps=60")
    (run.run_dir / "checkpoints" / "step-00000060").mkdir(parents=True)
    assert run.once(FAILS="", RANK_CODE="17") == 17


def test_nobody_starts_a_run_again_that_is_not_to_go_on(life):
    run = life("executor.continuation=none")
    assert run.once(signal.SIGUSR1) == 75
    assert run.asked() == []


def test_a_checkpoint_that_is_half_written_is_nothing_to_go_on_from(life):
    run = life()
    (run.run_dir / "checkpoints" / "step-00000020.unfinished").mkdir(parents=True)
    run.once(FAILS="", RANK_CODE="1")
    process = run.start(SLURM_RESTART_COUNT="1", ASKED="/dev/null", FAILS="")
    run.end(process)
    assert not (run.run_dir / "up").read_text().endswith("--resume")


def test_without_checkpoints_a_signal_ends_the_job_as_always(make_plan, tmp_path):
    run = Life(tmp_path, make_plan(*TWO_BY_TWO))
    process = run.start()
    wait_until((run.run_dir / "pid").exists)
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(timeout=60) == -signal.SIGTERM
    finally:  # Slurm ends the ranks as it ends the script
        os.kill(int((run.run_dir / "pid").read_text()), signal.SIGKILL)
        run.end(process)
    assert "--signal" not in Slurm().render(run.plan, REQUEST).text


# A save that takes long


def in_s(seconds):
    """The time of the end of a job that has some seconds left, as Slurm writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def test_a_job_whose_ranks_do_not_save_in_time_is_requeued_before_its_end(life):
    run = life()
    slow = RANK.replace("time.sleep(0.2)", "time.sleep(60)")
    run.write("python", slow.format(python=shlex.quote(sys.executable)))
    process = run.start(ASKED=str(run.folder / "asked"), END=in_s(9))
    wait_until((run.run_dir / "up").exists)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: run.asked() == ["requeue 41"])
    assert process.poll() is None
    os.kill(int((run.run_dir / "pid").read_text()), signal.SIGKILL)  # as Slurm does
    run.end(process)
    assert run.asked() == ["requeue 41"]
    assert "before the end of the job: executor.save_lead_s has to be longer\n" in run.done.stdout
    given_s = int((run.run_dir / "save_times").read_text().split()[0]) // 2
    assert 1 <= given_s <= 9
    assert not (run.run_dir / "exit" / "stopped.json").exists()


def test_a_job_that_is_cancelled_while_its_ranks_save_is_not_requeued(life):
    """Slurm says that it ends now, as it does of one whose time is over."""
    run = life()
    assert run.once(signal.SIGTERM, END=in_s(0), JOB_STATE="CANCELLED") == 75
    assert run.asked() == []
    assert "trireme: leaves job 41 to Slurm, where it is CANCELLED\n" in run.done.stdout
    assert not (run.run_dir / "save_times").exists()


def test_ranks_that_save_in_time_are_not_requeued_by_the_watch_as_well(life):
    run = life()
    assert run.once(signal.SIGUSR1, END=in_s(8)) == 75
    assert run.asked() == ["requeue 41"]
    assert not (run.run_dir / "save_times").exists()


def test_the_script_tells_the_ranks_in_time_without_a_signal_of_slurm(life):
    run = life("executor.save_lead_s=600")
    assert run.once(END=in_s(3)) == 75
    assert run.asked() == ["requeue 41"]


@pytest.mark.parametrize(
    ("time_s", "planned_s", "is_set", "measured", "lead_s"),
    [
        (3600, 120, "no", "", 120),
        (3600, 120, "no", "40 step\n", 120),
        (3600, 120, "no", "300 step\n240 late\n", 300),
        (3600, 120, "no", "9000 late\n", 1800),
        (0, 120, "no", "9000 late\n", 9000),
        (3600, 20, "yes", "300 step\n", 20),
    ],
)
def test_the_lead_is_what_the_run_has_measured_unless_it_is_set(
    tmp_path, time_s, planned_s, is_set, measured, lead_s
):
    """At most half of the time, where that is known."""
    (tmp_path / "save_times").write_text(measured)
    code = (
        f"run={tmp_path} time={time_s} save_lead_s={planned_s} lead_is_set={is_set}; . slurm/limit.sh; lead"
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert int(done.stdout) == lead_s


def test_a_start_with_a_lead_that_is_too_short_says_so(life):
    run = life("executor.save_lead_s=3")
    (run.run_dir / "save_times").write_text("300 step 1 s, save 90 s\n")
    assert run.once(END=in_s(7)) == 75
    said = "executor.save_lead_s=3 is too short: as measured, the ranks need 300 s to save\n"
    assert said in run.done.stdout


@pytest.mark.parametrize(
    ("set_s", "measured", "says"),
    [
        ("20", "300 step\n", ["executor.save_lead_s=20 is too short: as measured, the ranks need 300 s"]),
        ("400", "300 step\n", []),
        ("0", "300 step\n", []),
        ("null", "300 step\n", []),
        ("20", "", []),
        ("20", "torn", []),
    ],
)
def test_who_submits_again_is_told_of_a_lead_that_is_too_short(make_plan, tmp_path, set_s, measured, says):
    (tmp_path / "save_times").write_text(measured)
    plan = make_plan(*TWO_BY_TWO, *SAVES, f"executor.save_lead_s={set_s}")
    script = Slurm().render(plan, replace(REQUEST, run_dir=str(tmp_path)))
    told = list(lead_warnings(script))
    assert [line.partition(" to save. Set executor.save_lead_s=300, or leave")[0] for line in told] == says


def test_a_short_limit_has_a_lead_of_a_quarter_of_it(make_plan):
    text = Slurm().render(make_plan(*TWO_BY_TWO, *SAVES, "site.time_limit=00:02:00"), REQUEST).text
    assert "#SBATCH --signal=B:USR1@30\n" in text
    assert "save_lead_s=30\nlead_is_set=no\n" in text


# What may be chosen, and what is told of it


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ((), ["#SBATCH --requeue", "#SBATCH --signal=B:USR1@120"]),
        (("executor.save_lead_s=0",), ["#SBATCH --requeue"]),
        (CHAIN, ["#SBATCH --no-requeue", "#SBATCH --signal=B:USR1@120"]),
        (("executor.continuation=none",), ["#SBATCH --no-requeue", "#SBATCH --signal=B:USR1@120"]),
    ],
)
def test_slurm_is_told_who_requeues_and_when_to_tell_the_ranks(make_plan, overrides, lines):
    text = Slurm().render(make_plan(*TWO_BY_TWO, *SAVES, *overrides), REQUEST).text
    asked = ("#SBATCH --requeue", "#SBATCH --no-requeue", "#SBATCH --signal")
    assert [line for line in text.splitlines() if line.startswith(asked)] == lines


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*SAVES, "site.time_limit=00:02:00", "executor.save_lead_s=120"),
            r"executor\.save_lead_s=120: the ranks would be asked to stop as they start, since "
            r"site\.time_limit is 00:02:00\. Set executor\.save_lead_s=30, or a longer",
        ),
        (
            ("executor.continuation=chain",),
            r"executor\.continuation=chain: a job would have nothing to resume from, since "
            r"train\.checkpoint_interval is 0\. Set train\.checkpoint_interval=15\.",
        ),
        (
            (*SAVES, "executor.continuation=none", "executor.max_restarts=1"),
            r"executor\.max_restarts=1: nothing starts the ranks again with executor\.continuation=none\. "
            r"Set executor\.max_restarts=0\.",
        ),
        (
            (*SAVES, "executor.max_starts=2", "executor.max_restarts=3"),
            r"executor\.max_restarts=3: there are at most executor\.max_starts=2 starts\. Set .*=1\.",
        ),
        (
            ("executor.max_restarts=3",),
            r"executor\.max_restarts=3: a restart would have nothing to resume from, since "
            r"train\.checkpoint_interval is 0\. Set train\.checkpoint_interval=15, or "
            r"executor\.max_restarts=0\.",
        ),
    ],
)
def test_a_continuation_that_cannot_be_is_refused(make_plan, overrides, message):
    with pytest.raises(PlanError, match=message):
        render(make_plan(*TWO_BY_TWO, *overrides), Path(REQUEST.run_dir))


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (
            SAVES,
            [
                "Slurm requeues the job after a preemption and when a node fails, and its own script 120 s "
                "or more before its time limit, when the ranks have saved: at most 8 starts, not counting "
                "those after a preemption or a node's failure (executor.max_starts). The run has failed "
                "after 5 starts in a row that nodes ended before anything more was saved "
                "(executor.max_node_failures)."
            ],
        ),
        (
            (),
            [
                "Slurm requeues the job after a preemption and when a node fails: at most 8 starts, not "
                "counting those after a preemption or a node's failure (executor.max_starts). The run has "
                "failed after 5 starts in a row that nodes ended before anything more was saved "
                "(executor.max_node_failures).",
                "Since train.checkpoint_interval is 0, a requeued job starts from the beginning, and nothing "
                "is saved at its end.",
            ],
        ),
        (
            (*SAVES, *CHAIN),
            [
                "It is submitted as 3 jobs. The first ends 120 s or more before its time limit, when the "
                "ranks have saved, and the next goes on; those that are not needed are cancelled, and "
                "nothing is requeued, so each job counts, whatever has ended it "
                "(executor.continuation=chain)."
            ],
        ),
        (
            (*SAVES, *CHAIN, "executor.save_lead_s=0"),
            [
                "It is submitted as 3 jobs. The first ends at its time limit, without a signal to the ranks, "
                "and the next goes on; those that are not needed are cancelled, and nothing is requeued, so "
                "each job counts, whatever has ended it (executor.continuation=chain)."
            ],
        ),
        (
            ("executor.continuation=none",),
            ["Nothing starts the run again when it is interrupted (executor.continuation=none)."],
        ),
    ],
)
def test_the_plan_says_who_starts_the_run_again(make_plan, overrides, notes):
    assert list(make_plan(*TWO_BY_TWO, *overrides).notes)[-len(notes) :] == notes


@pytest.mark.parametrize(
    ("overrides", "rest"),
    [
        (("executor.continuation=none",), "going on takes executor.continuation=requeue and a train.checkpo"),
        ((), "it is ended after site.time_limit = 00:10:00: going on takes a train.checkpoint_interval."),
        ((*SAVES, "executor.save_lead_s=0"), "going on takes an executor.save_lead_s."),
        ((*SAVES, "executor.max_starts=1"), "going on takes a larger executor.max_starts."),
        (
            (*SAVES, *CHAIN),
            "3 starts (executor.max_starts) of 00:10:00 each (site.time_limit) are not enough.",
        ),
    ],
)
def test_the_plan_says_that_a_run_takes_longer_than_its_time_limit(make_plan, overrides, rest):
    limited = (*TWO_BY_TWO, *overrides, "site.time_limit=00:10:00")
    long, short = (make_plan(*limited, f"train.num_steps={steps}") for steps in (40000, 150))
    note = long.notes[-1]
    assert note.startswith("The run is predicted to take about 1 h ")
    assert rest in note
    assert not any("is predicted to take" in note for note in short.notes)


@pytest.mark.parametrize("limit", ["UNLIMITED", "0", "3-00", "100:00:00"])
def test_a_limit_that_is_long_or_none_ends_no_run_early(make_plan, limit):
    overrides = (*SAVES, "executor.max_starts=1", f"site.time_limit={limit}", "train.num_steps=40000")
    plan = make_plan(*TWO_BY_TWO, *overrides)
    assert not any("is predicted to take" in note for note in plan.notes)
    assert f"#SBATCH --time={limit}\n" in Slurm().render(plan, REQUEST).text
    speaks_of_limit = any("before its time limit" in note for note in plan.notes)
    assert speaks_of_limit == (limit not in ("UNLIMITED", "0"))


@pytest.mark.parametrize(
    ("limit", "meaning"),
    [
        ("90", "1 h 30 min: Slurm reads it as minutes."),
        ("1:30", "1 min 30 s: Slurm reads it as minutes and seconds."),
    ],
)
def test_the_plan_says_what_slurm_makes_of_a_time_without_hours(make_plan, limit, meaning):
    lead = ("executor.save_lead_s=10",)
    notes = make_plan(*TWO_BY_TWO, *SAVES, *lead, f"site.time_limit={limit}", "train.num_steps=150").notes
    assert notes[-1] == f"site.time_limit={limit} is {meaning}"


def test_a_lead_that_the_signal_cannot_have_is_refused(make_plan):
    with pytest.raises(
        ConfigError, match=r"executor\.save_lead_s=70000: must be a whole number from 0 to 65535"
    ):
        make_plan(*TWO_BY_TWO, *SAVES, "executor.save_lead_s=70000")


def test_starts_enough_for_a_long_run_are_not_spoken_of(make_plan):
    limited = (*TWO_BY_TWO, *SAVES, "site.time_limit=00:10:00", "train.num_steps=40000")
    assert not any("is predicted to take" in note for note in make_plan(*limited).notes)


def test_the_plan_says_how_long_a_run_that_hangs_takes_to_fail(make_plan):
    note = make_plan(*TWO_BY_TWO, *SAVES, "executor.max_restarts=2").notes[-1]
    assert note == (
        "After a failure the ranks are restarted from the newest intact checkpoint, at most 2 times "
        "(executor.max_restarts). A run that hangs each time has failed after 3 times 600 s (run.timeout_s) "
        "without progress: 30 min 0 s; where it never makes a step, after 3 times 1800 s "
        "(run.start_timeout_s): 1 h 30 min."
    )


def test_a_chain_is_as_many_jobs_as_starts(make_plan):
    assert Slurm().render(make_plan(*TWO_BY_TWO, *SAVES, *CHAIN), REQUEST).num_jobs == 3
    assert Slurm().render(make_plan(*TWO_BY_TWO, *SAVES), REQUEST).num_jobs == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_run_that_is_killed_where_nothing_is_saved_is_not_finished(stage_that_waits, number):
    run = stage_that_waits
    process = run.start(ASKED=str(run.folder / "asked"))
    wait_until(lambda: (run.run_dir / "setting-up").exists())
    process.send_signal(number)
    run.end(process)
    assert run.done.returncode == -number
    assert run.record() == f'{{"job": "41", "exit_code": {128 + number}}}\n'
    (run.run_dir / "go").touch()
    assert run.once(FAILS="", SLURM_RESTART_COUNT="1") == 0
    assert (run.run_dir / "logs" / "starts").read_text() == "41.0\n41.1\n"


@pytest.fixture
def stage_that_waits(tmp_path, make_plan):
    """A job whose own set-up takes until it is told to go on."""
    words = (*TWO_BY_TWO, 'site.setup=[\': >"$run/setting-up"; until [ -e "$run/go" ]; do sleep 0.1; done\']')
    return Life(tmp_path, make_plan(*words))


# The lock of the run directory


def content(**words):
    holder = lock.Holder(token="another", host="login", pid=7, since="2025-01-02T03:04:05+00:00", **words)
    return lock._text(holder)


def test_a_start_holds_the_lock_of_its_run_until_its_end(life):
    run = life()
    process = run.start(ASKED=str(run.folder / "asked"))
    wait_until((run.run_dir / "up").exists)
    data = (run.run_dir / "lock").read_bytes()
    held = lock.holder_of(data)
    assert (held.job, held.host, held.pid) == ("41", socket.gethostname(), process.pid)
    assert lock._text(held) == data, "as the ranks write it"
    environment = Path(f"/proc/{(run.run_dir / 'pid').read_text()}/environ").read_bytes()
    assert f"TRIREME_LOCK={held.token}".encode() in environment.split(b"\0")
    assert (run.run_dir / "lock").stat().st_mode & 0o777 == 0o600
    process.send_signal(signal.SIGTERM)
    run.end(process)
    assert not (run.run_dir / "lock").exists()


def test_a_start_takes_over_from_the_one_before_of_its_own_job(life):
    run = life()
    (run.run_dir / "lock").write_bytes(content(job="41"))
    assert run.once(signal.SIGTERM) == 75


def test_a_start_whose_lock_was_taken_over_leaves_the_record_and_the_lock_to_the_other(life):
    run = life()
    process = run.start(ASKED=str(run.folder / "asked"))
    wait_until((run.run_dir / "up").exists)
    (run.run_dir / "lock").write_bytes(content(job="42"))
    process.send_signal(signal.SIGTERM)
    run.end(process)
    assert run.done.returncode == 1
    assert f"trireme: another start has {run.run_dir} by now" in run.done.stderr
    assert run.asked() == []
    assert (run.run_dir / "lock").read_bytes() == content(job="42")
    assert not (run.run_dir / "exit" / "job.json").exists()


HURRIED = """#!/bin/bash
[ "$1" = 1 ] && echo . >>"$WAITED" && set -- 0
[ -n "$RAISES" ] && printf '%s' "$RANDOM$RANDOM" >>"$LOCK"
exec /bin/sleep "$@"
"""


def test_a_start_waits_for_another_holder_until_its_counter_stands_still(life):
    run = life()
    run.write("sleep", HURRIED)
    (run.run_dir / "lock").write_bytes(content())
    assert run.once(signal.SIGTERM, WAITED=str(run.folder / "waited")) == 75
    assert len((run.folder / "waited").read_text().split()) == 15


def test_a_start_ends_where_another_holder_goes_on_and_names_it(life):
    run = life()
    run.write("sleep", HURRIED)
    (run.run_dir / "lock").write_bytes(content())
    raised = {"RAISES": "yes", "LOCK": str(run.run_dir / "lock")}
    assert run.once(WAITED=str(run.folder / "waited"), **raised) == 1
    message = f"trireme: {run.run_dir} is in use, which job 41 has waited 15 min for: {{"
    assert message in run.done.stderr
    assert '"host": "login"' in run.done.stderr
    assert not (run.run_dir / "exit").exists()


def test_a_start_in_a_directory_that_is_not_there_makes_none(life):
    run = life()
    run.run_dir.rename(run.folder / "elsewhere")
    assert run.once() == 1
    named = f"there is no {run.run_dir} on {socket.gethostname()}: is its file system mounted?"
    assert named in run.done.stderr
    assert not run.run_dir.exists()


def test_starts_and_ends_are_events_which_the_first_node_gives_to_the_command(life, tmp_path):
    told = tmp_path / "told.jsonl"
    code = f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read())"
    run = life(f'run.notify=[{sys.executable},"-c","{code}"]')
    (run.run_dir / "plan.json").write_text(run.plan.to_json())
    append(run.run_dir, Event(time="2026-01-02T03:04:05+00:00", kind="cancelled"))
    with (run.run_dir / EVENTS).open("a") as file:
        file.write('{"time": "2026-0')  # of a writer that was killed
    assert run.once(signal.SIGUSR1) == 75
    found = [(event.kind, event.done) for event in read_events(run.run_dir)]
    assert found == [
        ("cancelled", ""),
        ("start", "job 41, start 1"),
        ("requeue", "job 41 after start 1"),
        ("stopped", "job 41: the ranks have saved"),
    ]
    kinds = [json.loads(line)["kind"] for line in told.read_text().splitlines()]
    assert kinds == ["start", "requeue", "stopped"]


@pytest.mark.parametrize(
    ("signals", "variables", "state"), [((signal.SIGUSR1,), {}, "pending"), ((), {"FAILS": ""}, "succeeded")]
)
def test_the_first_node_writes_the_figures_of_the_run(life, signals, variables, state):
    run = life("run.prometheus=run.prom")
    (run.run_dir / "plan.json").write_text(run.plan.to_json())
    run.once(*signals, **variables)
    found = samples_of((run.run_dir / "run.prom").read_text())
    told = {
        dict(labels)["state"] for (name, labels), value in found.items() if name.endswith("_state") and value
    }
    assert told == {state}


def test_a_job_that_fails_is_an_event(life):
    run = life()
    assert run.once(FAILS="", RANK_CODE="3") == 3
    assert [event.done for event in read_events(run.run_dir)][-1] == "job 41 ended with code 3"
