"""The lock of a folder: one holder, whose counter stands still when it is gone, and who sees its loss."""

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from launcher.app.wait import end_runs
from launcher.base import lock, registry
from launcher.base.errors import JobError, LauncherError
from launcher.base.lock import Holder, LostLockError, holder_of
from launcher.base.processes import birth_of, is_called_with, system_id
from launcher.contract.job import JobState, RunConfig, rank_words
from launcher.runs.claim import claimed, ranks_left
from launcher.runs.store import RunDirectory, new_directory
from tests.helpers.objects import there
from tests.helpers.waiting import wait_until

GONE = 2**22 + 1
"""Above every number of a process."""


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch):
    """Holders look often, and are soon taken for gone."""
    for name, value in (("INTERVAL_S", 0.05), ("STILL_S", 1.0), ("_PATIENCE_S", 0.2), ("_ASK_S", 0.02)):
        monkeypatch.setattr(lock, name, value)


@pytest.fixture
def said():
    return []


def write(folder, **content):
    """Puts the lock of somebody into a folder."""
    here = Holder(token="theirs", since="2025-01-02T03:04:05+00:00", pid=GONE, birth="then")
    here = replace(here, host=socket.gethostname(), system=system_id())
    (folder / "lock").write_bytes(lock._text(replace(here, **content)))


def held(folder):
    return holder_of(there(lock.read(folder)))


def no_word(text):
    raise AssertionError(f"it waits: {text}")


def test_a_lock_names_its_process_and_is_gone_when_given_back(tmp_path):
    lease = claimed(tmp_path, no_word)
    holder = held(tmp_path)
    assert (holder.pid, holder.birth, holder.host) == (
        os.getpid(),
        birth_of(os.getpid()),
        socket.gethostname(),
    )
    assert holder.is_here
    assert holder.is_alive
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
    lease.release()
    assert not (tmp_path / "lock").exists()


def test_a_lock_that_is_held_is_refused_with_the_holder_and_what_to_do(tmp_path):
    lease = claimed(tmp_path, no_word)
    with pytest.raises(
        JobError,
        match=rf"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()} since 20.*, which "
        rf"has not ended\. trireme wait {tmp_path} follows it, trireme cancel {tmp_path} ends it; start",
    ):
        claimed(tmp_path, no_word)
    lease.release()


def test_the_lock_of_a_process_that_is_gone_is_taken_over_at_once(tmp_path):
    write(tmp_path)
    claimed(tmp_path, no_word).release()


def test_the_number_of_a_process_that_is_gone_may_be_another_ones_by_now(tmp_path):
    write(tmp_path, pid=os.getpid(), birth="another time")
    claimed(tmp_path, no_word).release()


def test_who_ends_while_it_takes_over_is_taken_over_from(tmp_path):
    write(tmp_path, token="second")
    (tmp_path / "lock").rename(tmp_path / "lock.after-theirs")
    write(tmp_path)
    lease = claimed(tmp_path, no_word)
    assert held(tmp_path).token == lease.token
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    lease.release()


def test_a_lock_that_was_taken_over_meanwhile_is_left(tmp_path):
    write(tmp_path)
    seen = there(lock.read(tmp_path))
    lease = claimed(tmp_path, no_word)
    assert lock.take_over(tmp_path, seen) is None
    assert held(tmp_path).token == lease.token
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    lease.release()


def test_one_of_eight_gets_a_lock_whose_holder_is_gone(tmp_path):
    for _ in range(10):
        write(tmp_path)
        together = threading.Barrier(8)

        def attempt(_, together=together):
            together.wait()
            try:
                return claimed(tmp_path, no_word)
            except JobError:
                return None

        with ThreadPoolExecutor(8) as pool:
            (winner,) = filter(None, pool.map(attempt, range(8)))
        assert held(tmp_path).token == winner.token
        winner.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
def test_a_holder_elsewhere_whose_counter_stands_still_is_gone_whatever_the_clocks_say(
    tmp_path, said, monkeypatch, shift_s
):
    clock = time.time
    began = clock()
    monkeypatch.setattr(time, "time", lambda: clock() + shift_s * (clock() - began))
    write(tmp_path, host="elsewhere", pid=os.getpid())
    before = time.monotonic()
    claimed(tmp_path, said.append).release()
    assert time.monotonic() - before >= 1.0
    assert said == [
        f"{tmp_path.name}: waiting 1 s to see whether process {os.getpid()} on elsewhere since "
        "2025-01-02T03:04:05+00:00 still runs"
    ]


def test_a_holder_elsewhere_that_raises_its_counter_is_left_alone(tmp_path, said):
    lease = there(lock.create(tmp_path))
    text = (tmp_path / "lock").read_text().replace(socket.gethostname(), "elsewhere")
    (tmp_path / "lock").write_text(text)
    with pytest.raises(JobError, match=rf"is in use by process {os.getpid()} on elsewhere since"):
        claimed(tmp_path, said.append)
    assert len(said) == 1
    lease.release()


def test_the_same_host_name_after_another_start_of_it_is_another_place(tmp_path, said):
    write(tmp_path, system="another boot", pid=os.getpid(), birth=birth_of(os.getpid()))
    claimed(tmp_path, said.append).release()
    assert "waiting 1 s" in said[0]


@pytest.mark.parametrize("data", [b"", b'{"token": "a', b"[]", b'{"token": 3, "pid": "x"}'])
def test_a_lock_that_was_left_half_written_is_waited_for_and_taken(tmp_path, said, data):
    (tmp_path / "lock").write_bytes(data)
    claimed(tmp_path, said.append).release()
    assert "whether somebody who is not named still runs" in said[0]


def test_a_lock_that_is_no_file_is_told_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(OSError, match=f"^{tmp_path}/lock is not a regular file$"):
        claimed(tmp_path, no_word)


def test_one_of_two_holders_raises_the_counter(tmp_path):
    lease = there(lock.create(tmp_path))
    member = lock.Lease(tmp_path, lease.token, no_word)
    wait_until(lambda: int(held(tmp_path).beat) > 3)
    lease._watch.ended.set()  # a launcher that is killed: its ranks go on
    before = int(held(tmp_path).beat)
    wait_until(lambda: int(held(tmp_path).beat) > before + 3)
    member.release()
    assert held(tmp_path).token == lease.token, "a member leaves the lock to the one that has taken it"
    lease.release()


def test_a_lock_that_nobody_has_any_more_is_given_back(tmp_path):
    lease = there(lock.create(tmp_path))
    threads = threading.active_count()
    del lease
    gc.collect()
    assert not (tmp_path / "lock").exists()
    wait_until(lambda: threading.active_count() < threads)


def test_a_process_that_ends_in_whatever_way_python_sees_gives_its_lock_back(tmp_path):
    code = (
        "import pathlib as p, sys; from launcher.base import lock; x = lock.create(p.Path(sys.argv[1])); x()"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, check=False)
    assert b"TypeError" in done.stderr
    assert list(tmp_path.iterdir()) == []


def taken_over(folder):
    write(folder, host="elsewhere", pid=7)


def moved(folder):
    folder.rename(folder.with_name("moved"))


def covered(folder):
    """As the folder below a mount that is lost."""
    moved(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (taken_over, r"it was taken over by process 7 on elsewhere since 2025-01-02T03:04:05\+00:00\."),
        (
            moved,
            r"its lock is gone\. The folder was moved or removed, or its file system is no longer mounted\.",
        ),
        (
            covered,
            r"its lock is gone\. The folder was moved or removed, or its file system is no longer mounted\.",
        ),
    ],
)
def test_a_holder_that_has_lost_its_lock_writes_nothing_and_says_why(tmp_path, lose, why):
    folder = tmp_path / "mine"
    folder.mkdir()
    directory = RunDirectory(folder, there(lock.create(folder)))
    directory.write("status.json", "{}")
    lose(folder)
    there_before = sorted(tmp_path.rglob("*"))
    message = (
        rf"^{folder} on {socket.gethostname()} is no longer the folder that this process held: {why} Nothing"
    )
    with pytest.raises(LostLockError, match=message):
        directory.write("other", "")
    with pytest.raises(LostLockError, match=message):
        wait_until(directory.check)
    directory.release()
    assert sorted(tmp_path.rglob("*")) == there_before


def test_a_member_that_does_not_write_is_told_of_the_loss_at_once(tmp_path):
    losses: list[LostLockError] = []
    lease = there(lock.create(tmp_path))
    member = lock.Lease(tmp_path, lease.token, losses.append)
    taken_over(tmp_path)
    wait_until(lambda: losses)
    assert "taken over" in str(losses[0])
    member.release()
    assert held(tmp_path).token == "theirs"


def test_a_lock_that_is_missing_for_a_moment_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_S", 60.0)
    lease = there(lock.create(tmp_path))
    data = (tmp_path / "lock").read_bytes()
    (tmp_path / "lock").unlink()
    threading.Timer(0.1, (tmp_path / "lock").write_bytes, [data]).start()
    lease.check(anew=True)
    lease.release()


# Of a run


class Scheduler:
    def __init__(self, *answers):
        self.answers = list(answers)

    def state(self, job):
        answer = self.answers.pop(0)
        if isinstance(answer, JobError):
            raise answer
        return JobState(phase=answer)


@pytest.fixture
def of_a_job(tmp_path, monkeypatch):
    """The lock of a job's start, elsewhere; takes what its scheduler says."""
    write(tmp_path, host="node7", job="7_3")
    (tmp_path / "handle.json").write_text(json.dumps({"executor": "slurm", "id": "7_3"}))
    scheduler = Scheduler()
    monkeypatch.setattr(registry, "load", lambda kind, name: scheduler)
    return scheduler


def test_a_job_that_goes_on_by_what_its_scheduler_says_keeps_its_lock(of_a_job, tmp_path):
    of_a_job.answers = ["running"]
    with pytest.raises(
        JobError,
        match=rf"^{tmp_path} belongs to job 7_3, which has not ended .* trireme cancel .* ends it\.$",
    ):
        claimed(tmp_path, no_word)


def test_the_lock_of_a_job_that_has_ended_is_taken_over_at_once(of_a_job, tmp_path):
    of_a_job.answers = ["failed"]
    claimed(tmp_path, no_word).release()


def test_the_counter_tells_where_the_scheduler_does_not(of_a_job, tmp_path, said):
    of_a_job.answers = [JobError("squeue gave no answer")]
    claimed(tmp_path, said.append).release()
    assert "whether job 7_3 on node7 since" in said[0]


def looks_of(lease, monkeypatch, num_checks):
    """How often the file is read in this thread while the lock is asked for."""
    here, read, looks = threading.get_ident(), lock.read, []

    def counted(*given):
        looks.extend([1] * (threading.get_ident() == here))
        return read(*given)

    monkeypatch.setattr(lock, "read", counted)
    for _ in range(num_checks):
        lease.check()
    return len(looks)


def test_a_holder_that_asks_often_reads_the_file_only_after_a_gap(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "INTERVAL_S", 60.0)
    lease = there(lock.create(tmp_path))
    lease.check()
    assert looks_of(lease, monkeypatch, 100) == 0
    lease._watch._looked_at -= 100.0  # as after a stop of the process
    assert looks_of(lease, monkeypatch, 100) == 1
    lease.release()


def test_what_the_thread_has_found_is_raised_without_another_look(tmp_path, monkeypatch):
    lease = there(lock.create(tmp_path))
    taken_over(tmp_path)
    wait_until(lambda: lease._watch._loss)
    with pytest.raises(LostLockError, match="it was taken over by process 7 on elsewhere"):
        looks_of(lease, monkeypatch, 1)


@pytest.fixture
def left(tmp_path):
    """A run whose launcher is gone, and a rank of it that is not."""
    write(tmp_path)
    (tmp_path / "exit").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()", *rank_words(str(tmp_path))]
    )
    wait_until(lambda: is_called_with(process.pid, rank_words(str(tmp_path))))
    known = {"rank": 1, "pid": process.pid, "birth": birth_of(process.pid), "system": system_id()}
    (tmp_path / "exit" / "rank-1.process").write_text(json.dumps(known))
    (tmp_path / "exit" / "rank-0.process").write_text(json.dumps(known | {"rank": 0, "birth": "before"}))
    (tmp_path / "exit" / "rank-2.process").write_text(json.dumps({"pid": [1], "rank": 2}))
    yield process
    process.kill()
    process.wait()


def test_a_rank_that_outlived_its_launcher_keeps_the_run(left, tmp_path, said):
    text = rf"rank 1 \(process {left.pid}\)"
    with pytest.raises(
        JobError,
        match=rf"in use by {text} of a start whose launcher is gone\. trireme cancel \S+ ends them; start",
    ):
        claimed(tmp_path, said.append)
    assert re.search(rf"waiting 1 s for {text} of an earlier start to end$", said[0])


@pytest.mark.parametrize("words", [(), rank_words("/runs/another")], ids=["no rank", "of another run"])
def test_a_process_that_is_no_rank_of_the_run_is_not_ended_whatever_its_files_say(tmp_path, words):
    (tmp_path / "exit").mkdir()
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", *words])
    known = {"rank": 1, "pid": process.pid, "birth": birth_of(process.pid), "system": system_id()}
    (tmp_path / "exit" / "rank-1.process").write_text(json.dumps(known))
    directory = RunDirectory(tmp_path)
    (tmp_path / "status.json").write_text(
        json.dumps({"phase": "running", "pid": GONE, "birth": "then", "hostname": socket.gethostname()})
    )
    assert ranks_left(tmp_path) == {}
    end_runs([directory])
    assert process.poll() is None
    process.kill()
    process.wait()


def followed_by(run_dir, process, **changes):
    """A run whose files say that a process follows it."""
    status = {"phase": "running", "pid": process.pid, "birth": birth_of(process.pid)}
    status |= {"hostname": socket.gethostname()} | changes
    (run_dir / "status.json").write_text(json.dumps(status))
    return RunDirectory(run_dir)


@pytest.mark.parametrize(
    ("words", "changes"),
    [(["run"], {}), (["x/trireme.txt", "run"], {}), (["trireme", "run"], {"birth": ""})],
    ids=["another program", "a file of the name", "of an earlier version"],
)
def test_a_process_that_need_not_follow_the_run_is_not_ended(tmp_path, words, changes):
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", *words]) as process:
        directory = followed_by(tmp_path, process, **changes)
        message = (
            rf"names process {process.pid}, and it cannot be told whether that follows the run\. See what it "
            rf"is, then end it: ps {process.pid}; kill {process.pid}"
        )
        with pytest.raises(JobError, match=message):
            end_runs([directory])
        assert process.poll() is None
        process.kill()


def test_a_process_that_was_called_as_this_program_is_ended(tmp_path):
    program = tmp_path / "trireme"
    program.write_text("import signal; signal.pause()")
    with subprocess.Popen([sys.executable, program, "run", "quickstart"]) as process:
        end_runs([followed_by(tmp_path, process)])
        assert process.wait() == -signal.SIGTERM


def test_a_program_that_has_started_the_ranks_of_the_run_is_ended(tmp_path):
    (tmp_path / "exit").mkdir()
    rank = [sys.executable, "-c", "import signal; signal.pause()", *rank_words(str(tmp_path))]
    starter = (
        f"import subprocess; child = subprocess.Popen({rank!r}); print(child.pid, flush=True); child.wait()"
    )
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {starter!r}])"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "it has a pipe"
        pid = int(process.stdout.readline())
        known = {"rank": 0, "pid": pid, "birth": birth_of(pid), "system": system_id()}
        (tmp_path / "exit" / "rank-0.process").write_text(json.dumps(known))
        wait_until(lambda: ranks_left(tmp_path) == {0: pid})
        end_runs([followed_by(tmp_path, process)])
        assert process.wait() == -signal.SIGTERM
        os.kill(pid, signal.SIGKILL)


def test_a_rank_that_is_left_is_ended(left, tmp_path):
    (tmp_path / "status.json").write_text(
        json.dumps({"phase": "running", "pid": GONE, "birth": "then", "hostname": socket.gethostname()})
    )
    end_runs([RunDirectory(tmp_path)])
    assert left.wait() == -signal.SIGKILL


def test_ranks_that_end_while_they_are_waited_for_leave_the_run(left, tmp_path, said):
    def end(text):
        left.kill()
        left.wait()

    claimed(tmp_path, end).release()


def test_one_of_eight_moves_a_run_aside(tmp_path):
    run = RunConfig(dir=str(tmp_path / "mine"), root="runs", timeout_s=1.0, start_timeout_s=1.0)
    first = new_directory(run, "x")
    first.write("plan.json", "{}")
    first.release()
    together = threading.Barrier(8)

    def attempt(_):
        together.wait()
        try:
            return new_directory(run, "x", overwrite=True)
        except LauncherError:
            return None

    with ThreadPoolExecutor(8) as pool:
        (winner,) = filter(None, pool.map(attempt, range(8)))
    assert held(winner.path).token == there(winner.lease).token
    (aside,) = tmp_path.glob("mine.*")
    assert (aside / "plan.json").is_file()
    assert not (aside / "lock").exists()
    winner.release()
