import json
from dataclasses import replace

import pytest

from launcher.errors import JobError
from launcher.jobs.script import EXECUTOR_LOG, JobHandle, JobScript, JobState
from launcher_plugins.executors import slurm
from launcher_plugins.executors.slurm import Slurm
from launcher_plugins.executors.slurm_commands import Answer, ask, left_out
from launcher_plugins.executors.slurm_state import from_record, from_sacct, from_scontrol, guilty_rank

LIVE = "JobId=7 JobName=JobState=X Priority=1 JobState={} Reason={} Dependency=(null) ExitCode={} Restarts=0"
FORGOTTEN = Answer(code=1, output="", error="slurm_load_jobs error: Invalid job id specified")
NO_ACCOUNTS = Answer(code=1, output="", error="Slurm accounting storage is disabled")


@pytest.mark.parametrize(
    ("name", "reason", "code", "state"),
    [
        ("PENDING", "Resources", "0:0", JobState(phase="pending", reason="waits: Resources")),
        ("PENDING", "None", "0:0", JobState(phase="pending", reason="waits")),
        ("RUNNING", "None", "0:0", JobState(phase="running")),
        ("COMPLETING", "None", "0:0", JobState(phase="running", reason="completing")),
        ("COMPLETED", "None", "0:0", JobState(phase="succeeded", exit_code=0)),
        (
            "FAILED",
            "NonZeroExitCode",
            "17:0",
            JobState(phase="failed", exit_code=17, reason="Slurm says FAILED"),
        ),
        (
            "TIMEOUT",
            "TimeLimit",
            "0:15",
            JobState(phase="failed", exit_code=-15, reason="reached its time limit (site.time_limit)"),
        ),
        ("NODE_FAIL", "None", "1:0", JobState(phase="failed", exit_code=1, reason="a node failed")),
        (
            "CANCELLED",
            "None",
            "0:15",
            JobState(phase="cancelled", exit_code=-15, reason="Slurm says CANCELLED"),
        ),
        ("NEW_IN_SLURM_30", "None", "0:0", JobState(phase="running", reason="new_in_slurm_30")),
    ],
)
def test_every_state_of_slurm_has_its_meaning(name, reason, code, state):
    assert from_scontrol(LIVE.format(name, reason, code).replace("JobName=JobState=X", "JobName=x")) == state


def test_the_accounts_are_read_as_text():
    assert from_sacct("FAILED|17:0").exit_code == 17
    assert from_sacct("CANCELLED by 0|0:15").phase == "cancelled"


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
    assert guilty_rank(f"srun: launch/slurm: x\n{line}{others}") == (rank, code)
    assert guilty_rank(f"{others.lstrip()}{line}") == (rank, code)


def test_a_log_without_an_error_names_nobody():
    assert guilty_rank("trireme: job 7\nall is well\n") is None


class Answers:
    """Stands in for Slurm's commands."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def __call__(self, words, environment):
        self.asked.append(words)
        return self.answers[words[0]]


@pytest.fixture
def handle(tmp_path):
    for folder in ("exit", "logs"):
        (tmp_path / folder).mkdir()
    return JobHandle(id="7", run_dir=str(tmp_path))


def state(monkeypatch, handle, **answers):
    monkeypatch.setattr(slurm, "ask", Answers(**answers))
    return Slurm().state(handle)


def test_a_job_that_the_controller_knows_needs_no_accounts(monkeypatch, handle):
    live = Answer(code=0, output=LIVE.format("RUNNING", "None", "0:0"), error="")
    assert state(monkeypatch, handle, scontrol=live).phase == "running"


def test_a_job_that_the_controller_forgot_is_looked_up_in_the_accounts(monkeypatch, handle):
    accounts = Answer(code=0, output="PREEMPTED|0:0\nCOMPLETED|0:0", error="")
    assert state(monkeypatch, handle, scontrol=FORGOTTEN, sacct=accounts).phase == "succeeded"


def test_without_accounts_the_job_tells_by_its_own_record(monkeypatch, handle, tmp_path):
    (tmp_path / "exit" / "job.json").write_text('{"job": "7", "exit_code": 0}\n')
    assert state(monkeypatch, handle, scontrol=FORGOTTEN, sacct=NO_ACCOUNTS).phase == "succeeded"


def test_a_job_that_nobody_knows_has_failed(monkeypatch, handle):
    found = state(monkeypatch, handle, scontrol=FORGOTTEN, sacct=NO_ACCOUNTS)
    assert (found.phase, found.reason) == ("failed", "Slurm forgot job 7, and it left no record of its end")


def test_a_controller_that_is_away_is_no_verdict(monkeypatch, handle):
    away = Answer(code=1, output="", error="Unable to contact slurm controller")
    with pytest.raises(JobError, match="does not say how job 7 stands: Unable to contact slurm controller"):
        state(monkeypatch, handle, scontrol=away, sacct=NO_ACCOUNTS)


def test_the_guilty_rank_is_that_of_the_newest_start(monkeypatch, handle, tmp_path):
    (tmp_path / EXECUTOR_LOG).write_text(
        "trireme: job 7, restart 0, by srun: rendezvous 7.0 at a:1\n"
        "srun: error: a: task 3: Exited with exit code 1\n"
        "trireme: job 7, restart 1, by srun: rendezvous 7.1 at a:1\n"
        "srun: error: a: task 2: Exited with exit code 17\n"
    )
    failed = Answer(code=0, output=LIVE.format("FAILED", "NonZeroExitCode", "143:0"), error="")
    assert state(monkeypatch, handle, scontrol=failed) == JobState(
        phase="failed", exit_code=17, reason="ended with exit code 17", rank=2
    )


def test_under_torchrun_a_task_is_a_node_and_the_rank_is_in_its_report(monkeypatch, handle, tmp_path):
    (tmp_path / EXECUTOR_LOG).write_text(
        "trireme: job 7, restart 0, by torchrun: rendezvous 7.0 at a:1\n"
        "Root Cause (first observed failure):\n"
        "  rank      : 5 (local_rank: 1)\n  exitcode  : 3 (pid: 9)\n"
        "srun: error: b: task 1: Exited with exit code 1\n"
    )
    failed = Answer(code=0, output=LIVE.format("FAILED", "NonZeroExitCode", "1:0"), error="")
    assert (
        state(monkeypatch, handle, scontrol=failed).rank,
        state(monkeypatch, handle, scontrol=failed).exit_code,
    ) == (5, 3)


# Submitting


SCRIPT = JobScript(argv=("sbatch", "--parsable", "/runs/a/job.sh"), environment={}, run_dir="/runs/a")


def submitted(monkeypatch, *answers, sinfo=None):
    queue, asked = list(answers), []

    def reply(words, environment):
        asked.append(words)
        return sinfo if words[0] == "sinfo" else queue.pop(0)

    monkeypatch.setattr(slurm, "ask", reply)
    return asked


def test_a_job_is_checked_and_then_submitted_once(monkeypatch):
    good = Answer(code=0, output="12;cluster", error="")
    asked = submitted(monkeypatch, good, good)
    assert Slurm().submit(SCRIPT).id == "12"
    assert asked == [("sbatch", "--test-only", "/runs/a/job.sh"), SCRIPT.argv]


def test_a_refused_job_is_not_submitted_and_the_setting_is_named(monkeypatch):
    bad = Answer(code=1, output="", error="allocation failure: Invalid partition name specified")
    asked = submitted(monkeypatch, bad, sinfo=Answer(code=0, output="short\nbatch", error=""))
    with pytest.raises(
        JobError,
        match=r"Invalid partition name specified\. Look at site\.partition\. Partitions here: batch, short\.",
    ):
        Slurm().submit(SCRIPT)
    assert [words[0] for words in asked] == ["sbatch", "sinfo"]


def test_what_is_left_out_of_the_environment_is_said(monkeypatch):
    good = Answer(code=0, output="12", error="")
    submitted(monkeypatch, good, good)
    monkeypatch.setenv("SLURM_CPU_BIND", "cores")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    (note,) = Slurm().submit(SCRIPT).notes
    assert "SLURM_CPUS_PER_TASK, SLURM_CPU_BIND" in note


def test_commands_see_neither_job_state_nor_hidden_options():
    environment = {
        "SLURM_CONF": "/c",
        "SLURM_ARRAY_JOB_ID": "3",
        "SLURM_JOB_CPUS_PER_NODE": "64(x2)",
        "SBATCH_QOS": "x",
    }
    assert left_out(environment) == ["SBATCH_QOS", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_CPUS_PER_NODE"]
    told = ask(("env",), environment | {"PATH": "/usr/bin:/bin"})
    assert told.output.splitlines() == ["SLURM_CONF=/c", "PATH=/usr/bin:/bin"]


def test_a_machine_without_slurm_is_told_so():
    with pytest.raises(
        JobError, match=r"no-such-sbatch is not on this machine\. .* or look with --dry-run\."
    ):
        ask(("no-such-sbatch",), {})


def test_a_job_that_has_ended_already_is_cancelled_without_complaint(monkeypatch, handle):
    monkeypatch.setattr(slurm, "ask", Answers(scancel=FORGOTTEN))
    Slurm().cancel(handle)


def test_a_refused_cancel_is_told(monkeypatch, handle):
    monkeypatch.setattr(slurm, "ask", Answers(scancel=Answer(code=1, output="", error="Access denied")))
    with pytest.raises(JobError, match="does not cancel job 7: Access denied"):
        Slurm().cancel(handle)


# Chains


CHAIN = replace(SCRIPT, num_jobs=3)


def test_each_job_of_a_chain_waits_until_the_one_before_has_not_finished(monkeypatch, tmp_path):
    (tmp_path / "logs").mkdir()
    answers = [Answer(code=0, output=output, error="") for output in ("", "7", "8", "9")]
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
    good = Answer(code=0, output="7", error="")
    bad = Answer(code=1, output="", error="Job violates accounting/QOS policy")
    asked = submitted(monkeypatch, good, good, bad, good)
    with pytest.raises(JobError, match="violates accounting/QOS policy"):
        Slurm().submit(CHAIN)
    assert asked[-1] == ("scancel", "7")


@pytest.mark.parametrize(
    ("states", "phase", "num_asked"),
    [
        (("RUNNING", "PENDING", "PENDING"), "running", 1),
        (("FAILED", "PENDING", "PENDING"), "pending", 2),
        (("TIMEOUT", "NODE_FAIL", "RUNNING"), "running", 3),
        (("FAILED", "COMPLETED", "CANCELLED"), "succeeded", 2),
        (("FAILED", "CANCELLED", "CANCELLED"), "failed", 2),
        (("CANCELLED", "CANCELLED", "CANCELLED"), "cancelled", 2),
        (("FAILED", "FAILED", "FAILED"), "failed", 3),
    ],
)
def test_a_chain_stands_as_the_last_job_that_was_needed(monkeypatch, tmp_path, states, phase, num_asked):
    asked = []

    def reply(words, environment):
        asked.append(words[-1])
        state = states[int(words[-1]) - 7]
        return Answer(code=0, output=LIVE.format(state, "None", "75:0"), error="")

    monkeypatch.setattr(slurm, "ask", reply)
    assert Slurm().state(JobHandle(id="7,8,9", run_dir=str(tmp_path))).phase == phase
    assert len(asked) == num_asked


def test_a_chain_is_cancelled_from_its_end(monkeypatch):
    answers = Answers(scancel=Answer(code=0, output="", error=""))
    monkeypatch.setattr(slurm, "ask", answers)
    Slurm().cancel(JobHandle(id="7,8,9", run_dir="/runs/a"))
    assert answers.asked == [("scancel", "9", "8", "7")]


def test_a_run_that_saved_and_has_no_start_left_says_how_to_go_on(monkeypatch, handle, tmp_path):
    (tmp_path / EXECUTOR_LOG).write_text("trireme: job 7, restart 0, by srun: rendezvous 7.0 at a:1\n")
    (tmp_path / "exit" / "stopped.json").write_text('{"step": 40, "signal": "SIGUSR1"}\n')
    failed = Answer(code=0, output=LIVE.format("FAILED", "NonZeroExitCode", "75:0"), error="")
    found = state(monkeypatch, handle, scontrol=failed)
    assert found.reason == "cut short, saved after step 40: trireme submit --resume goes on"
