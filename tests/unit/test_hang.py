"""Of several ranks that all stopped, the one is named that the others waited for."""

import os

import pytest

from launcher.contract.heartbeat import (
    DOING,
    SIZE,
    heartbeat_name,
    pack_alive,
    pack_into,
    pack_woke,
    stacks_name,
)
from launcher.contract.job import JobState
from launcher.contract.records import RANK_KINDS, SERVER
from launcher.runs.failure import failure_text
from launcher.runs.hang import find_hang, with_hang
from tests.helpers.objects import there

STACKS = """\
Timeout (0:00:05)!
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Thread 0x00007f0 (most recent call first):
  File "/home/me/mine.py", line 7 in __getitem__
  File "/home/me/main.py", line 1 in <module>
"""
FAILED = JobState(phase="failed", exit_code=1, reason="ended with exit code 1", rank=0)


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "exit").mkdir()
    return tmp_path


def beat(run_dir, rank, time, doing, stacks=None, step=3, ends=0.0, alive_s=0.0, woke=(0.0, 0.0)):
    data = bytearray(SIZE)
    pack_into(data, time, step, doing.encode(), ends)
    pack_alive(data, alive_s)
    pack_woke(data, *woke)
    (run_dir / heartbeat_name(rank)).write_bytes(data)
    (run_dir / stacks_name(rank)).write_text(stacks or "")
    os.utime(run_dir / stacks_name(rank), (105.0, 105.0))


def test_every_kind_of_time_has_words_and_fits_into_the_file(run_dir):
    assert set(RANK_KINDS) <= set(DOING)
    for doing in DOING:
        beat(run_dir, 0, 100.0, doing, STACKS)
        assert there(find_hang(run_dir)).heartbeat.doing == doing


def test_the_rank_that_did_not_wait_hung_though_others_were_ended_first(run_dir):
    beat(run_dir, 0, 99.0, "pipeline", STACKS, alive_s=6.0)
    beat(run_dir, 1, 100.0, "compute", alive_s=5.0)
    beat(run_dir, 2, 99.5, "tp", STACKS, alive_s=5.5)
    assert there(find_hang(run_dir)).rank == 1


def test_of_several_that_did_not_wait_the_one_heard_from_longest_ago_hung(run_dir):
    beat(run_dir, 0, 101.0, "compute", STACKS)
    beat(run_dir, 1, 100.0, "input_wait", STACKS)
    assert there(find_hang(run_dir)).rank == 1


def test_where_all_wait_for_each_other_the_one_heard_from_longest_ago_is_named(run_dir):
    beat(run_dir, 0, 101.0, "dp", STACKS)
    beat(run_dir, 1, 100.0, "pipeline", STACKS)
    assert there(find_hang(run_dir)).rank == 1


@pytest.mark.parametrize(("silent_s", "step", "guilty"), [(4.0, 3, 2), (1.0, 3, 0), (4.0, -1, 0)])
def test_a_server_that_has_stopped_saying_that_it_waits_hung(run_dir, silent_s, step, guilty):
    beat(run_dir, 0, 100.5, SERVER, STACKS)
    beat(run_dir, 1, 100.6, SERVER, STACKS)
    beat(run_dir, 2, 105.0 - silent_s, "serving", step=step)
    assert there(find_hang(run_dir)).rank == guilty


@pytest.mark.parametrize("set_by_s", [-3600, 0, 3600])
def test_a_wall_clock_that_was_set_changes_nothing_of_who_hung_for_how_long(run_dir, set_by_s):
    beat(run_dir, 0, 100.5, SERVER, STACKS, ends=105.0)
    beat(run_dir, 1, 101.0, "serving", ends=106.0)
    os.utime(run_dir / stacks_name(0), (105.0 + set_by_s,) * 2)
    hang = there(find_hang(run_dir))
    assert (hang.rank, hang.silent_s) == (1, 4.0)


def test_without_a_watchdog_that_ended_a_rank_nothing_hung(run_dir):
    beat(run_dir, 0, 100.0, "compute")
    beat(run_dir, 1, 90.0, "pipeline")
    assert find_hang(run_dir) is None
    assert with_hang(FAILED, run_dir) == FAILED


def test_a_run_that_left_no_heartbeat_did_not_hang(tmp_path):
    assert find_hang(tmp_path) is None


def test_the_state_names_the_rank_that_hung_in_place_of_the_one_that_ended_first(run_dir):
    beat(run_dir, 0, 100.5, "pipeline", STACKS)
    beat(run_dir, 1, 100.0, "compute", STACKS)
    state = with_hang(FAILED, run_dir)
    assert (state.phase, state.rank, state.exit_code) == ("failed", 1, 1)
    assert state.reason == ("hung in a forward or backward of step 4: not heard from for 5 s (run.timeout_s)")


@pytest.mark.parametrize(
    ("doing", "words"), [("building", "building the model before the first step"), ("other", "in its start")]
)
def test_a_start_that_takes_too_long_is_told_as_such(run_dir, doing, words):
    beat(run_dir, 0, 101.0, "peers", STACKS, step=-1)
    beat(run_dir, 1, 100.0, doing, STACKS, step=-1)
    state = with_hang(FAILED, run_dir)
    assert (state.rank, state.reason) == (
        1,
        f"hung {words}: no step within run.start_timeout_s, not heard from for 5 s",
    )


def test_a_run_that_succeeded_is_left_alone(run_dir):
    beat(run_dir, 0, 100.5, "compute", STACKS)
    state = JobState(phase="succeeded", exit_code=0)
    assert with_hang(state, run_dir) == state


def test_the_text_shows_where_the_rank_was_and_who_waited(run_dir):
    beat(run_dir, 0, 100.5, "pipeline", STACKS)
    beat(run_dir, 1, 100.0, "input_wait", STACKS)
    assert failure_text(run_dir, FAILED).splitlines() == [
        "rank 1 hung waiting for data of step 4: not heard from for 5 s (run.timeout_s)",
        "",
        "Where it was, the innermost call first:",
        '  File "/home/me/mine.py", line 7 in __getitem__',
        '  File "/home/me/main.py", line 1 in <module>',
        "",
        f"All its threads: {run_dir}/exit/rank-1.stacks",
        "Waiting for other ranks then: rank 0.",
        f"Its log: {run_dir}/logs/rank-1.log",
    ]


def test_of_many_ranks_that_waited_some_are_named(run_dir):
    for rank in range(12):
        beat(run_dir, rank, 100.0 + rank, "dp", STACKS)
    assert "Waiting for other ranks then: rank 1, rank 2, " in failure_text(run_dir, FAILED)
    assert "rank 8, 3 more." in failure_text(run_dir, FAILED)


@pytest.mark.parametrize("guilty", range(4))
@pytest.mark.parametrize("doing", ["dp", "pipeline", "peers", "compute"])
@pytest.mark.parametrize("began", [99.0, 103.0])
def test_a_rank_that_was_stopped_while_it_waited_like_the_others_hung(run_dir, guilty, doing, began):
    """Each waited since another time; only one did not run until the end."""
    for rank in range(4):
        if rank == guilty:
            beat(run_dir, rank, began, doing, alive_s=0.9)
        else:
            beat(run_dir, rank, 100.0 + rank, "dp", STACKS, ends=110.5, alive_s=10.5 - rank)
    hang = there(find_hang(run_dir))
    assert hang.rank == guilty
    assert str(hang).endswith(
        f": its Python did not run for {110.5 - began - 0.9:.1f} s, as when a process is stopped, its node "
        "stands still, or C code keeps the GIL (run.timeout_s)"
    )


@pytest.mark.parametrize("guilty", range(4))
def test_a_rank_that_ran_on_for_a_moment_when_the_job_was_ended_had_been_stopped(run_dir, guilty):
    """As Slurm has it: it continues a process before it ends it."""
    for rank in range(4):
        if rank == guilty:
            beat(run_dir, rank, 111.7, "dp", alive_s=0.0, woke=(111.6, 11.0))
        else:
            beat(run_dir, rank, 100.0 + rank, "dp", STACKS, ends=110.5, alive_s=10.5 - rank)
    hang = there(find_hang(run_dir))
    assert (hang.rank, hang.stopped_s) == (guilty, 11.0)


def test_a_rank_that_was_stopped_and_went_on_long_before_is_not_blamed(run_dir):
    beat(run_dir, 0, 100.0, "compute", STACKS, alive_s=10.0)
    beat(run_dir, 1, 101.0, "dp", alive_s=9.2, woke=(90.0, 30.0))
    assert there(find_hang(run_dir)).rank == 0


def test_ranks_that_all_ran_until_the_end_are_told_apart_by_what_they_did(run_dir):
    beat(run_dir, 0, 100.0, "pipeline", STACKS, alive_s=10.0)
    beat(run_dir, 1, 101.0, "compute", alive_s=8.2)
    beat(run_dir, 2, 101.5, "dp", alive_s=7.9)
    assert there(find_hang(run_dir)).rank == 1


def test_a_rank_that_outlived_the_one_that_was_ended_first_was_not_stopped(run_dir):
    beat(run_dir, 0, 100.0, "pipeline", STACKS, alive_s=10.0)
    beat(run_dir, 1, 101.0, "compute", alive_s=60.0)
    assert there(find_hang(run_dir)).rank == 1


@pytest.mark.parametrize("later_s", [6.0, 25.0])
def test_a_rank_whose_own_watchdog_fired_first_was_not_stopped(run_dir, later_s):
    beat(run_dir, 0, 1000.0, "dp", STACKS, ends=1060.0, alive_s=60.0)
    beat(run_dir, 1, 1000.0 + later_s, "compute", STACKS, ends=1060.0 + later_s, alive_s=60.0)
    assert there(find_hang(run_dir)).rank == 1


def test_hosts_whose_clocks_differ_a_little_do_not_stop_each_others_ranks(run_dir):
    beat(run_dir, 0, 990.0, "dp", alive_s=60.0)  # by a clock that is 10 s behind
    beat(run_dir, 1, 1000.0, "compute", STACKS, ends=1060.0, alive_s=60.0)
    assert there(find_hang(run_dir)).rank == 1


def test_a_stopped_rank_whose_watchdog_fires_as_it_goes_on_hung(run_dir):
    beat(run_dir, 0, 1000.0, "dp", STACKS, ends=1060.0, alive_s=2.0)
    beat(run_dir, 1, 1001.0, "dp", STACKS, ends=1061.0, alive_s=60.0)
    assert there(find_hang(run_dir)).rank == 0
