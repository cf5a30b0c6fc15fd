import json

from launcher.contract.job import EXECUTOR_LOG, JobState
from launcher.runs.failure import failure_line, failure_text, rank_failures


def leave(run_dir, rank, time, error_type="RuntimeError", message="broken", traceback="Traceback: broken"):
    (run_dir / "exit").mkdir(exist_ok=True)
    report = {
        "rank": rank,
        "time": time,
        "error_type": error_type,
        "message": message,
        "traceback": traceback,
    }
    (run_dir / "exit" / f"rank-{rank}.json").write_text(json.dumps(report))


def log(run_dir, name, text):
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / name).write_text(text)


def test_the_rank_that_failed_first_comes_first_with_its_own_traceback(tmp_path):
    leave(tmp_path, 0, 7.5, message="Connection closed by peer", traceback="Traceback: a victim")
    leave(tmp_path, 3, 7.1, "ValueError", "no such token", "Traceback: the cause")
    text = failure_text(tmp_path, JobState(phase="failed", exit_code=1, rank=0))
    assert text.splitlines() == [
        "rank 3 failed: ValueError: no such token",
        "",
        "Traceback: the cause",
        "",
        "After it failed: rank 0.",
        f"Its log: {tmp_path}/logs/rank-3.log",
    ]


def test_an_error_that_explains_itself_has_neither_traceback_nor_class(tmp_path):
    leave(tmp_path, 1, 1.0, "JobError", "the plan was changed", "")
    assert failure_text(tmp_path, JobState(phase="failed", exit_code=1)).splitlines() == [
        "rank 1 failed: the plan was changed",
        f"Its log: {tmp_path}/logs/rank-1.log",
    ]


def test_a_killed_rank_is_guilty_though_only_its_victims_left_reports(tmp_path):
    leave(tmp_path, 0, 1.0, message="Connection closed by peer")
    log(tmp_path, "logs/rank-1.log", "step 1\nstep 2\n")
    state = JobState(phase="failed", exit_code=-9, reason="killed by signal 9 (SIGKILL)", rank=1)
    assert failure_text(tmp_path, state).splitlines() == [
        "rank 1 failed: killed by signal 9 (SIGKILL)",
        "The kernel does this when memory runs out (see dmesg); so does kill -9.",
        "",
        "  step 1",
        "  step 2",
        "",
        "After it failed: rank 0.",
        f"Its log: {tmp_path}/logs/rank-1.log",
    ]


def test_an_abort_of_a_broken_collective_does_not_hide_the_rank_that_raised(tmp_path):
    leave(tmp_path, 1, 1.0, message="the cause")
    state = JobState(phase="failed", exit_code=-6, reason="killed by signal 6 (SIGABRT)", rank=0)
    assert failure_text(tmp_path, state).startswith("rank 1 failed: RuntimeError: the cause")


def test_a_rank_that_ended_before_its_log_is_shown_by_the_starters_output(tmp_path):
    log(tmp_path, EXECUTOR_LOG, "No module named 'torch'\n")
    text = failure_text(tmp_path, JobState(phase="failed", exit_code=1, reason="ended", rank=0))
    assert text.splitlines() == [
        "rank 0 failed: ended",
        "",
        "  No module named 'torch'",
        "",
        f"Its log: {tmp_path}/{EXECUTOR_LOG}",
    ]


def test_a_job_that_fails_before_any_rank_tells_the_starters_reason(tmp_path):
    log(tmp_path, EXECUTOR_LOG, "line\n" * 40 + "bad option\n")
    text = failure_text(tmp_path, JobState(phase="failed", exit_code=2, reason="torchrun ended with code 2"))
    assert text.splitlines()[0] == "the job failed: torchrun ended with code 2"
    assert text.count("line") == 14
    assert "bad option" in text


def test_a_report_cut_short_is_passed_over(tmp_path):
    leave(tmp_path, 0, 1.0)
    (tmp_path / "exit" / "rank-1.json").write_text('{"rank": 1, "ti')
    assert [failure.rank for failure in rank_failures(tmp_path)] == [0]


def test_the_line_of_a_failure_is_the_first_of_what_the_guilty_rank_raised(tmp_path):
    leave(tmp_path, 3, 7.1, "ValueError", "no such token\nin the text", "Traceback: the cause")
    assert (
        failure_line(tmp_path, JobState(phase="failed", exit_code=1)) == "rank 3: ValueError: no such token"
    )


def test_the_line_of_a_silent_failure_is_how_the_rank_ended(tmp_path):
    state = JobState(phase="failed", exit_code=-9, reason="was killed by SIGKILL", rank=1)
    leave(tmp_path, 0, 7.5, message="Connection closed by peer")
    assert failure_line(tmp_path, state) == "rank 1 was killed by SIGKILL"
