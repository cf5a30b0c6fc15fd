import json
from itertools import permutations

import pytest

from launcher.contract.job import EXECUTOR_LOG, JobState, RankEnd
from launcher.runs.failure import failure_line, failure_text, rank_failures, unless_trained, with_cause


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


SIGNALLED = JobState(phase="failed", exit_code=1, reason="torchrun ended with exit code 1")
KILLED_LAST = JobState(phase="failed", exit_code=-9, reason="killed by signal 9 (SIGKILL)", rank=1)


def saved(run_dir, *steps, num_steps=60):
    (run_dir / "plan.json").write_text(json.dumps({"config": {"train": {"num_steps": num_steps}}}))
    for step in steps:
        (run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


@pytest.mark.parametrize("state", [SIGNALLED, KILLED_LAST])
def test_a_run_that_is_ended_by_a_signal_behind_its_last_save_is_finished(tmp_path, state):
    saved(tmp_path, 50)
    assert unless_trained(state, tmp_path) == state
    saved(tmp_path, 60)
    leave(tmp_path, 0, 7.5, message="Connection closed by peer")
    assert unless_trained(state, tmp_path) == JobState(phase="succeeded", exit_code=0)


def test_a_rank_that_fails_itself_behind_the_last_save_has_failed(tmp_path):
    saved(tmp_path, 60)
    silent = JobState(phase="failed", exit_code=17, reason="ended with exit code 17", rank=1)
    assert unless_trained(silent, tmp_path) == silent
    leave(tmp_path, 0, 7.5, message="broken")
    assert unless_trained(SIGNALLED, tmp_path) == SIGNALLED


@pytest.mark.parametrize("plan", ["", "[]", '{"config": 3}'])
def test_a_run_whose_plan_is_damaged_is_not_taken_for_finished(tmp_path, plan):
    saved(tmp_path, 60)
    (tmp_path / "plan.json").write_text(plan)
    assert unless_trained(SIGNALLED, tmp_path) == SIGNALLED


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


# The cause, of ranks that end because of each other

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:30117"
KILLED, FAILED, NATIVE, ENDED = (
    (-9, "killed by signal 9 (SIGKILL)"),
    (1, "ended with exit code 1"),
    (17, "ended with exit code 17"),
    (-15, "killed by signal 15 (SIGTERM)"),
)


def judged(run_dir, ends):
    """The rank that is blamed, and its exit code, where ranks have ended so, in this order."""
    told = [RankEnd(rank=rank, exit_code=code, reason=reason) for rank, (code, reason) in ends]
    first = told[0]
    state = JobState(
        phase="failed", exit_code=first.exit_code, reason=first.reason, rank=first.rank, ends=tuple(told)
    )
    judged = with_cause(state, run_dir)
    assert f"rank {judged.rank}" in failure_text(run_dir, judged).splitlines()[0]
    assert failure_line(run_dir, judged).startswith(f"rank {judged.rank}")
    return judged.rank, judged.exit_code


def test_a_server_that_is_killed_is_the_cause_and_not_a_worker_that_it_does_not_answer(tmp_path):
    leave(tmp_path, 1, 7.0, "PeerError", "a parameter server does not answer", traceback="")
    leave(tmp_path, 3, 7.1, "PeerError", "worker 1 (rank 1) has failed after 25 steps", traceback="")
    assert judged(tmp_path, [(1, FAILED), (3, FAILED), (2, KILLED)]) == (2, -9)


def test_a_rank_that_left_no_report_is_the_cause_in_whatever_order_the_others_are_told_of(tmp_path):
    """One of the others has lost its connection, another one was ended by the starter."""
    cases = [(order, guilty) for order in permutations(range(4)) for guilty in range(4)]
    for number, (order, guilty) in enumerate(cases):
        for end in (KILLED, NATIVE, (-11, "killed by signal 11 (SIGSEGV)")):
            run_dir = tmp_path / f"{number}{end[0]}"
            run_dir.mkdir()
            victims = [rank for rank in order if rank != guilty]
            leave(run_dir, victims[0], 7.0, message=GLOO)
            leave(run_dir, victims[1], 7.1, "DistBackendError", "NCCL error: remote process exited")
            how = {guilty: end, victims[0]: FAILED, victims[1]: FAILED, victims[2]: ENDED}
            assert judged(run_dir, [(rank, how[rank]) for rank in order]) == (guilty, end[0])


@pytest.mark.parametrize(
    ("kind", "message"), [("out of memory", "tried 9 bytes"), ("ConnectionResetError", "reset by peer")]
)
def test_an_error_of_a_ranks_own_is_the_cause_though_others_report_before_and_are_killed(
    tmp_path, kind, message
):
    """A rank that survives the signal to end is killed later."""
    cases = [(order, guilty) for order in permutations(range(4)) for guilty in range(4)]
    for number, (order, guilty) in enumerate(cases):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        victims = [rank for rank in order if rank != guilty]
        leave(run_dir, guilty, 7.2, kind, message)
        leave(run_dir, victims[0], 7.0, message=GLOO)
        how = {guilty: FAILED, victims[0]: FAILED, victims[1]: ENDED, victims[2]: KILLED}
        assert judged(run_dir, [(rank, how[rank]) for rank in order]) == (guilty, 1)


def test_of_ranks_that_all_lost_a_connection_the_first_is_named(tmp_path):
    leave(tmp_path, 1, 7.2, message=GLOO)
    leave(tmp_path, 0, 7.3, message=GLOO)
    assert judged(tmp_path, [(0, FAILED), (1, FAILED)]) == (1, 1)


def test_a_state_that_has_not_failed_is_left_alone(tmp_path):
    leave(tmp_path, 1, 7.2)
    state = JobState(phase="running")
    assert with_cause(state, tmp_path) == state
