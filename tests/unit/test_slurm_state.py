import json
import os
from dataclasses import replace

import pytest

from launcher.base.errors import JobError
from launcher.contract.job import EXECUTOR_LOG, JobHandle, JobScript, JobState
from launcher_plugins.executors.slurm import executor as slurm
from launcher_plugins.executors.slurm import queue as slurm_queue
from launcher_plugins.executors.slurm.commands import CommandResult, removed_names, run_command
from launcher_plugins.executors.slurm.executor import Slurm
from launcher_plugins.executors.slurm.state import from_record, rank_ends, read_sacct, read_squeue

LIVE = "7                  |{:20}|{:12}|0       |{:60}"
FORGOTTEN = CommandResult(code=1, output="", error="slurm_load_jobs error: Invalid job id specified")
NO_ACCOUNTS = CommandResult(code=1, output="", error="Slurm accounting storage is disabled")


@pytest.mark.parametrize(
    ("name", "status", "reason", "state"),
    [
        ("PENDING", "0", "Resources", JobState(phase="pending", reason="waits: Resources")),
        ("PENDING", "0", "None", JobState(phase="pending", reason="waits")),
        ("RUNNING", "0", "None", JobState(phase="running")),
        ("COMPLETING", "0", "None", JobState(phase="running", reason="completing")),
        ("COMPLETED", "0", "None", JobState(phase="succeeded", exit_code=0)),
        (
            "FAILED",
            "4352",
            "NonZeroExitCode",
            JobState(phase="failed", exit_code=17, reason="Slurm says FAILED"),
        ),
        (
            "TIMEOUT",
            "15",
            "TimeLimit",
            JobState(phase="failed", exit_code=-15, reason="reached its time limit (site.time_limit)"),
        ),
        ("NODE_FAIL", "256", "None", JobState(phase="failed", exit_code=1, reason="a node failed")),
        (
            "CANCELLED",
            "15",
            "None",
            JobState(phase="cancelled", exit_code=-15, reason="Slurm says CANCELLED"),
        ),
        ("NEW_IN_SLURM_30", "0", "None", JobState(phase="running", reason="new_in_slurm_30")),
    ],
)
def test_every_state_of_slurm_has_its_meaning(name, status, reason, state):
    assert read_squeue(LIVE.format(name, status, reason), ["7"]) == {"7": state}


QUEUE = """\
1                                       |FAILED              |4352        |0       |NonZeroExitCode
2                                       |PENDING             |0           |1       |BeginTime
4_[2-3%1]                               |PENDING             |0           |0       |JobArrayTaskLimit
4_1                                     |COMPLETED           |0           |0       |None
5+0                                     |RUNNING             |0           |2       |None
5+1                                     |PENDING             |0           |0       |None
"""


def test_arrays_and_het_jobs_stand_as_their_parts_do_together():
    states = read_squeue(QUEUE, ["1", "2", "3", "4", "4_1", "5"])
    assert {job: state.phase for job, state in states.items()} == {
        "1": "failed",
        "2": "pending",
        "4": "pending",
        "4_1": "succeeded",
        "5": "running",
    }
    assert (states["2"].reason, states["5"].reason) == ("requeued, restart 1 waits: BeginTime", "restart 2")


HISTORY = """\
7|NODE_FAIL|1:0
7|REQUEUED|0:0
7|COMPLETED|0:0
8|CANCELLED by 1000|0:15
9_1|COMPLETED|0:0
9_2|OUT_OF_MEMORY|0:125
10|FAILED|17:0
"""


def test_the_accounts_are_read_as_text_and_of_a_requeued_job_the_newest_start_counts():
    states = read_sacct(HISTORY, ["7", "8", "9", "10", "11"])
    assert {job: state.phase for job, state in states.items()} == {
        "7": "succeeded",
        "8": "cancelled",
        "9": "failed",
        "10": "failed",
    }
    assert states["9"].reason == "ran out of memory"
    assert states["10"].exit_code == 17


def test_a_record_counts_only_for_its_own_job():
    text = json.dumps({"job": "7", "exit_code": 3})
    assert from_record(text, "7") == JobState(phase="failed", exit_code=3, reason="Slurm says FAILED")
    assert from_record(text, "8") is None
    assert from_record("{", "7") is None


@pytest.mark.parametrize(
    ("line", "rank", "code"),
    [
        ("srun: error: node1: task 3: Exited with exit code 1", 3, 1),
        ("srun: error: node1: tasks 2-3: Exited with exit code 1", 2, 1),
        ("srun: error: node1: tasks [2,5-6]: Exited with exit code 2", 2, 2),
        ("srun: error: node0: task 0: Killed", 0, -9),
        ("srun: error: node0: task 1: Segmentation fault", 1, -11),
        ("srun: error: node0: task 1: Out Of Memory", 1, -9),
    ],
)
def test_srun_names_the_rank_that_ended_first(line, rank, code):
    others = "\nsrun: error: node0: tasks 0-1: Terminated\n"
    for output in (f"srun: launch/slurm: x\n{line}{others}", f"{others.lstrip()}{line}"):
        first = rank_ends(output)[0]
        assert (first.rank, first.exit_code) == (rank, code)


KILLED_FOR_MEMORY = """\
slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.
srun: error: node0: tasks 0-1: Exited with exit code 1
srun: error: node1: task 3: Out Of Memory
srun: error: node1: task 2: Terminated
"""


def test_every_rank_that_srun_names_is_known_with_its_end_and_who_ran_out_of_memory():
    ends = [(end.rank, end.reason) for end in rank_ends(KILLED_FOR_MEMORY)]
    assert ends == [
        (0, "ended with exit code 1"),
        (1, "ended with exit code 1"),
        (3, "killed by signal 9 (SIGKILL): memory ran out, as Slurm has seen"),
        (2, "killed by signal 15 (SIGTERM)"),
    ]
    (end,) = rank_ends("srun: error: node1: task 3: Killed")
    assert end.reason == "killed by signal 9 (SIGKILL)"


def test_a_log_without_an_error_names_nobody():
    assert rank_ends("trireme: job 7\nall is well\n") == []


class Answers:
    """Stands in for Slurm's commands."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def __call__(self, words):
        self.asked.append(words)
        return self.answers[words[0]]


@pytest.fixture
def handle(tmp_path):
    for folder in ("exit", "logs"):
        (tmp_path / folder).mkdir()
    return JobHandle(id="7", run_dir=str(tmp_path))


def state(monkeypatch, handle, **answers):
    monkeypatch.setattr(slurm_queue, "run_command", Answers(**answers))
    return Slurm().state(handle)


def test_a_job_that_the_controller_knows_needs_no_accounts(monkeypatch, handle):
    live = CommandResult(code=0, output=LIVE.format("RUNNING", "0", "None"), error="")
    assert state(monkeypatch, handle, squeue=live).phase == "running"


def test_a_job_that_the_controller_forgot_is_looked_up_in_the_accounts(monkeypatch, handle):
    accounts = CommandResult(code=0, output="7|PREEMPTED|0:0\n7|COMPLETED|0:0", error="")
    assert state(monkeypatch, handle, squeue=FORGOTTEN, sacct=accounts).phase == "succeeded"


def test_without_accounts_the_job_tells_by_its_own_record(monkeypatch, handle, tmp_path):
    (tmp_path / "exit" / "job.json").write_text('{"job": "7", "exit_code": 0}\n')
    assert state(monkeypatch, handle, squeue=FORGOTTEN, sacct=NO_ACCOUNTS).phase == "succeeded"


def test_a_job_that_nobody_knows_has_failed(monkeypatch, handle, tmp_path):
    (tmp_path / "logs" / "starts").write_text("7.0\n")
    found = state(monkeypatch, handle, squeue=FORGOTTEN, sacct=NO_ACCOUNTS)
    assert (found.phase, found.reason) == (
        "failed",
        "Slurm no longer knows job 7, and it left no record of its end",
    )


def test_a_job_that_nobody_knows_and_that_never_started_was_taken_out_of_the_queue(monkeypatch, handle):
    found = state(monkeypatch, handle, squeue=FORGOTTEN, sacct=NO_ACCOUNTS)
    assert (found.phase, found.reason) == ("cancelled", "left the queue before it started")


def test_a_controller_that_is_away_is_no_verdict(monkeypatch, handle):
    away = CommandResult(code=1, output="", error="Unable to contact slurm controller")
    with pytest.raises(
        JobError, match="does not report the state of job 7: Unable to contact slurm controller"
    ):
        state(monkeypatch, handle, squeue=away, sacct=NO_ACCOUNTS)


def test_without_a_cluster_the_way_to_one_is_told(monkeypatch, handle):
    away = CommandResult(code=1, output="", error="squeue: fatal: Could not establish a configuration source")
    with pytest.raises(
        JobError, match=r"a configuration source\. Set SLURM_CONF to the cluster's configuration$"
    ):
        state(monkeypatch, handle, squeue=away, sacct=NO_ACCOUNTS)


def test_the_first_failed_rank_is_that_of_the_newest_start(monkeypatch, handle, tmp_path):
    (tmp_path / EXECUTOR_LOG).write_text(
        "trireme: job 7, restart 0, by srun: rendezvous 7.0 at a:1\n"
        "srun: error: a: task 3: Exited with exit code 1\n"
        "2026-01-02T03:04:05.678Z trireme: job 7, restart 1, by srun: rendezvous 7.1 at a:1\n"
        "srun: error: a: task 2: Exited with exit code 17\n"
    )
    failed = CommandResult(code=0, output=LIVE.format("FAILED", str(143 << 8), "NonZeroExitCode"), error="")
    assert state(monkeypatch, handle, squeue=failed) == JobState(
        phase="failed", exit_code=17, reason="ended with exit code 17", rank=2
    )


def test_under_torchrun_a_task_is_a_node_and_the_rank_is_in_its_report(monkeypatch, handle, tmp_path):
    (tmp_path / EXECUTOR_LOG).write_text(
        "trireme: job 7, restart 0, by torchrun: rendezvous 7.0 at a:1\n"
        "Root Cause (first observed failure):\n"
        "  rank      : 5 (local_rank: 1)\n  exitcode  : 3 (pid: 9)\n"
        "srun: error: b: task 1: Exited with exit code 1\n"
    )
    failed = CommandResult(code=0, output=LIVE.format("FAILED", "256", "NonZeroExitCode"), error="")
    assert (
        state(monkeypatch, handle, squeue=failed).rank,
        state(monkeypatch, handle, squeue=failed).exit_code,
    ) == (5, 3)


# Submitting


SCRIPT = JobScript(argv=("sbatch", "--parsable", "/runs/a/job.sh"), environment={}, run_dir="/runs/a")


def submitted(monkeypatch, *answers, sinfo=None):
    queue, asked = list(answers), []

    def reply(words):
        asked.append(words)
        return sinfo if words[0] == "sinfo" else queue.pop(0)

    monkeypatch.setattr(slurm, "run_command", reply)
    return asked


@pytest.mark.parametrize(
    "output",
    ["12", "12;cluster", "Welcome to alps.\n12\n", "12;alps-2\n\n3 jobs of yours are queued", "  12"],
)
def test_a_job_is_checked_and_then_submitted_once(monkeypatch, output):
    """Its id is found among what a site prints."""
    good = CommandResult(code=0, output=output, error="")
    asked = submitted(monkeypatch, good, good)
    assert Slurm().submit(SCRIPT).id == "12"
    assert asked == [("sbatch", "--test-only", "/runs/a/job.sh"), SCRIPT.argv]


@pytest.mark.parametrize(
    ("output", "shown"), [("", "nothing"), ("Submitted batch job", "Submitted batch job"), ("7\n8", "7\n8")]
)
def test_an_answer_without_the_id_of_one_job_is_told(monkeypatch, output, shown):
    answer = CommandResult(code=0, output=output, error="")
    submitted(monkeypatch, answer, answer)
    with pytest.raises(
        JobError, match=f"did not print the id of one job, but: {shown}\nIf squeue --me lists"
    ):
        Slurm().submit(SCRIPT)


@pytest.mark.parametrize(
    ("output", "left_s"),
    [
        ("1-02:00:00", 93_600),
        ("4:59", 299),
        ("0:00", 0),
        ("Welcome to alps.\n 59:30", 3570),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_the_time_left_is_read_in_every_form(monkeypatch, output, left_s):
    submitted(monkeypatch, CommandResult(code=0, output=output, error=""))
    assert Slurm().time_left_s("7") == left_s


def test_a_refused_job_is_not_submitted_and_the_setting_is_named(monkeypatch):
    bad = CommandResult(code=1, output="", error="allocation failure: Invalid partition name specified")
    asked = submitted(monkeypatch, bad, sinfo=CommandResult(code=0, output="short\nbatch", error=""))
    with pytest.raises(
        JobError,
        match=r"Invalid partition name specified\. Look at site\.partition\. Partitions here: batch, short\.",
    ):
        Slurm().submit(SCRIPT)
    assert [words[0] for words in asked] == ["sbatch", "sinfo"]


def test_what_is_left_out_of_the_environment_is_said(monkeypatch):
    good = CommandResult(code=0, output="12", error="")
    submitted(monkeypatch, good, good)
    monkeypatch.setenv("SLURM_CPU_BIND", "cores")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    (note,) = Slurm().submit(SCRIPT).notes
    assert "SLURM_CPUS_PER_TASK, SLURM_CPU_BIND" in note


def test_commands_see_neither_job_state_nor_hidden_options(monkeypatch):
    environment = {
        "SLURM_CONF": "/c",
        "SLURM_ARRAY_JOB_ID": "3",
        "SLURM_JOB_CPUS_PER_NODE": "64(x2)",
        "SBATCH_QOS": "x",
    }
    assert removed_names(environment) == ["SBATCH_QOS", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_CPUS_PER_NODE"]
    monkeypatch.setattr(os, "environ", environment | {"PATH": "/usr/bin:/bin"})
    told = run_command(("env",))
    assert told.output.splitlines() == ["SLURM_CONF=/c", "PATH=/usr/bin:/bin"]


def test_a_machine_without_slurm_is_told_so():
    with pytest.raises(
        JobError, match=r"no-such-sbatch is not on this machine\. .* or look with --dry-run\."
    ):
        run_command(("no-such-sbatch",))


def test_a_job_that_has_ended_already_is_cancelled_without_complaint(monkeypatch, handle):
    monkeypatch.setattr(slurm, "run_command", Answers(scancel=FORGOTTEN))
    Slurm().cancel(handle)


def test_a_refused_cancel_is_told(monkeypatch, handle):
    monkeypatch.setattr(
        slurm, "run_command", Answers(scancel=CommandResult(code=1, output="", error="Access denied"))
    )
    with pytest.raises(JobError, match="does not cancel job 7: Access denied"):
        Slurm().cancel(handle)


# Chains


CHAIN = replace(SCRIPT, num_jobs=3)


def test_each_job_of_a_chain_waits_until_the_one_before_has_not_finished(monkeypatch, tmp_path):
    (tmp_path / "logs").mkdir()
    answers = [CommandResult(code=0, output=output, error="") for output in ("", "7", "8", "9")]
    asked = submitted(monkeypatch, *answers)
    handle = Slurm().submit(replace(CHAIN, run_dir=str(tmp_path)))
    assert handle.id == "7,8,9"
    assert [words[2:-1] for words in asked[1:]] == [
        (),
        ("--dependency=afternotok:7", "--kill-on-invalid-dep=yes"),
        ("--dependency=afternotok:8", "--kill-on-invalid-dep=yes"),
    ]
    assert (tmp_path / "logs" / "chain").read_text() == "7\n8\n9\n"


def test_a_chain_that_cannot_be_submitted_whole_is_taken_back(monkeypatch):
    good = CommandResult(code=0, output="7", error="")
    bad = CommandResult(code=1, output="", error="Job violates accounting/QOS policy")
    asked = submitted(monkeypatch, good, good, bad, good)
    with pytest.raises(JobError, match="violates accounting/QOS policy"):
        Slurm().submit(CHAIN)
    assert asked[-1] == ("scancel", "7")


@pytest.mark.parametrize(
    ("states", "phase"),
    [
        (("RUNNING", "PENDING", "PENDING"), "running"),
        (("FAILED", "PENDING", "PENDING"), "pending"),
        (("TIMEOUT", "NODE_FAIL", "RUNNING"), "running"),
        (("FAILED", "COMPLETED", "CANCELLED"), "succeeded"),
        (("FAILED", "CANCELLED", "CANCELLED"), "failed"),
        (("CANCELLED", "CANCELLED", "CANCELLED"), "cancelled"),
        (("FAILED", "FAILED", "FAILED"), "failed"),
    ],
)
def test_a_chain_stands_as_the_last_job_that_was_needed(monkeypatch, tmp_path, states, phase):
    lines = [
        LIVE.format(state, str(75 << 8), "None").replace("7", str(number), 1)
        for number, state in enumerate(states, 7)
    ]
    queue = Answers(squeue=CommandResult(code=0, output="\n".join(lines), error=""))
    monkeypatch.setattr(slurm_queue, "run_command", queue)
    assert Slurm().state(JobHandle(id="7,8,9", run_dir=str(tmp_path))).phase == phase
    assert [words[-1] for words in queue.asked] == ["--jobs=7,8,9"]


# Many runs


def test_many_runs_are_asked_about_in_one_command_and_the_forgotten_ones_in_another(monkeypatch, tmp_path):
    (tmp_path / "exit").mkdir()
    (tmp_path / "exit" / "job.json").write_text('{"job": "3", "exit_code": 0}\n')
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "starts").write_text("3.0\n")
    commands = Answers(
        squeue=CommandResult(code=0, output=QUEUE, error=""),
        sacct=CommandResult(code=0, output="8|COMPLETED|0:0\n", error=""),
    )
    monkeypatch.setattr(slurm_queue, "run_command", commands)
    handles = [JobHandle(id=job, run_dir=str(tmp_path)) for job in ("1", "8", "3", "99", "2")]
    phases = [state.phase for state in Slurm().states(handles)]
    assert phases == ["failed", "succeeded", "succeeded", "failed", "pending"]
    assert [words[-1] for words in commands.asked] == ["--jobs=1,8,3,99,2", "--jobs=8,3,99"]


def test_a_thousand_runs_are_asked_about_in_parts(monkeypatch, tmp_path):
    text = "\n".join(LIVE.format("RUNNING", "0", "None").replace("7", str(job), 1) for job in range(1000))
    commands = Answers(squeue=CommandResult(code=0, output=text, error=""))
    monkeypatch.setattr(slurm_queue, "run_command", commands)
    handles = [JobHandle(id=str(job), run_dir=str(tmp_path)) for job in range(1000)]
    assert {state.phase for state in Slurm().states(handles)} == {"running"}
    assert len(commands.asked) == 2


def test_a_chain_is_cancelled_from_its_end(monkeypatch):
    answers = Answers(scancel=CommandResult(code=0, output="", error=""))
    monkeypatch.setattr(slurm, "run_command", answers)
    Slurm().cancel(JobHandle(id="7,8,9", run_dir="/runs/a"))
    assert answers.asked == [("scancel", "9", "8", "7")]


def test_a_run_that_saved_and_has_no_start_left_says_how_to_go_on(monkeypatch, handle, tmp_path):
    (tmp_path / EXECUTOR_LOG).write_text("trireme: job 7, restart 0, by srun: rendezvous 7.0 at a:1\n")
    (tmp_path / "exit" / "stopped.json").write_text('{"step": 40, "signal": "SIGUSR1"}\n')
    failed = CommandResult(code=0, output=LIVE.format("FAILED", str(75 << 8), "NonZeroExitCode"), error="")
    found = state(monkeypatch, handle, squeue=failed)
    assert found.reason == "interrupted, saved after step 40: trireme submit --resume resumes it"


@pytest.mark.parametrize(
    ("is_late", "rest"), [(True, " before its ranks had saved (executor.save_lead_s)"), (False, "")]
)
def test_a_limit_that_came_before_the_ranks_had_saved_is_told_as_such(
    monkeypatch, handle, tmp_path, is_late, rest
):
    (tmp_path / EXECUTOR_LOG).write_text("trireme: job 7, restart 0, by srun: rendezvous 7.0 at a:1\n")
    if is_late:
        (tmp_path / "exit" / "late").touch()
    failed = CommandResult(code=0, output=LIVE.format("TIMEOUT", "15", "TimeLimit"), error="")
    found = state(monkeypatch, handle, squeue=failed)
    assert found.reason == f"reached its time limit (site.time_limit){rest}"
