import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.files import write_whole
from launcher.contract.heartbeat import SIZE, pack_into
from launcher.contract.job import STOP_NOTE, JobHandle, JobScript, JobState
from launcher.runs.watch import follow, stop_signals
from tests.helpers.objects import inside, there
from tests.helpers.run_folders import make_folders

SCRIPT = JobScript(argv=("x",), environment={}, run_dir="/runs/a")


class Scripted:
    """An executor whose job goes through given phases."""

    is_local = True

    def __init__(self, *phases):
        self.phases = list(phases)
        self.cancelled = 0

    def submit(self, script):
        return JobHandle(id="1", run_dir=script.run_dir)

    def state(self, handle):
        return JobState(phase=self.phases.pop(0) if len(self.phases) > 1 else self.phases[0])

    def cancel(self, handle):
        self.cancelled += 1


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)


@pytest.fixture(autouse=True)
def heard():
    """The tests may be started by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_job_is_followed_to_its_end_with_a_last_look_after_it():
    executor, ticks = Scripted("pending", "running", "running", "succeeded"), []
    with stop_signals() as stop:
        state = follow(inside(executor), SCRIPT, stop, lambda: ticks.append(1), print)
    assert state.phase == "succeeded"
    assert len(ticks) == 4


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)]
)
def test_a_signal_ends_the_job_and_gives_the_shells_exit_code(number, code):
    executor = Scripted("running")
    with stop_signals() as stop:
        state = follow(inside(executor), SCRIPT, stop, lambda: os.kill(os.getpid(), number), print)
    assert state == JobState(phase="cancelled", exit_code=code, reason=number.name)
    assert executor.cancelled == 1


def test_only_the_first_signal_counts():
    with stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is signal.SIGTERM


def test_whatever_happens_no_rank_is_left():
    executor = Scripted("running")

    def fail():
        raise ZeroDivisionError

    with stop_signals() as stop, pytest.raises(ZeroDivisionError):
        follow(inside(executor), SCRIPT, stop, fail, print)
    assert executor.cancelled == 1


class Saving(Scripted):
    """An executor whose ranks save when they are told to end."""

    def __init__(self, *phases, after, leaves_note=True):
        super().__init__(*phases)
        self.after, self.leaves_note = after, leaves_note
        self.told = 0

    def request_stop(self, handle):
        self.told += 1
        self.phases = list(self.after)
        if self.leaves_note:
            make_folders(Path(handle.run_dir))
            write_whole(Path(handle.run_dir) / STOP_NOTE, "{}")
        return True


@pytest.fixture
def clock(monkeypatch):
    """Time passes only in sleeps."""
    now = [100.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def stopped(executor, script, *, again=None, number=signal.SIGINT):
    """How a job ends that is told to stop at once, and once more in the tick ``again``."""
    ticks = []

    def tick():
        ticks.append(1)
        if len(ticks) in (1, again):
            os.kill(os.getpid(), number)

    with stop_signals() as stop:
        return follow(inside(executor), script, stop, tick, print), len(ticks)


def test_ranks_that_save_are_told_and_waited_for_and_the_user_reads_how_long(clock, capsys, tmp_path):
    executor = Saving("running", after=["running"] * 30 + ["succeeded"])
    script = replace(SCRIPT, run_dir=str(tmp_path), save_wait_s=60)
    state, ticks = stopped(executor, script)
    assert state == JobState(phase="cancelled", exit_code=130, reason="SIGINT")
    assert (executor.told, ticks) == (1, 31)
    assert capsys.readouterr().out == (
        "\nstopped by SIGINT: the ranks finish their step and save; this waits at most 1 min 0 s "
        "(executor.save_wait_s). Ctrl-C again ends them at once.\n"
    )


def test_a_signal_during_the_last_step_finds_the_run_finished(clock, tmp_path):
    executor = Saving("running", after=["running", "succeeded"], leaves_note=False)
    script = replace(SCRIPT, run_dir=str(tmp_path), save_wait_s=60)
    assert stopped(executor, script)[0] == JobState(phase="succeeded")


def test_a_second_signal_ends_ranks_that_save(clock, tmp_path):
    executor = Saving("running", after=["running"])
    script = replace(SCRIPT, run_dir=str(tmp_path), save_wait_s=60)
    state, ticks = stopped(executor, script, again=20)
    assert state.reason == "SIGINT and, before the ranks had ended, a second signal, SIGINT"
    assert (ticks, executor.cancelled) == (20, 1)


@pytest.mark.parametrize(("number", "again"), [(signal.SIGINT, 3), (signal.SIGUSR1, 20), (signal.SIGHUP, 20)])
def test_a_signal_that_is_sent_twice_by_the_system_is_one_request(clock, tmp_path, number, again):
    executor = Saving("running", after=["running"] * 30 + ["succeeded"])
    script = replace(SCRIPT, run_dir=str(tmp_path), save_wait_s=60)
    assert stopped(executor, script, again=again, number=number)[0].reason == number.name


def test_ranks_that_do_not_save_in_time_are_ended(clock, tmp_path):
    executor = Saving("running", after=["running"])
    script = replace(SCRIPT, run_dir=str(tmp_path), save_wait_s=2)
    state, ticks = stopped(executor, script)
    assert state.reason == "SIGINT and, before the ranks had ended, the end of executor.save_wait_s = 2 s"
    assert 20 <= ticks <= 24


def test_ranks_that_save_nothing_are_not_waited_for(clock):
    executor = Saving("running", after=["running"])
    state, ticks = stopped(executor, SCRIPT)
    assert (state.reason, executor.told, ticks) == ("SIGINT", 0, 1)


def leave(run_dir, step, **failure):
    """What a rank leaves that failed after some steps."""
    (run_dir / "exit").mkdir(exist_ok=True)
    beat = bytearray(SIZE)
    pack_into(beat, 1.0, step, b"compute")
    (run_dir / "exit" / "rank-0.heartbeat").write_bytes(beat)
    record = {"rank": 0, "time": 2.0, "error_type": "JobError", "message": "no space", "traceback": ""}
    (run_dir / "exit" / "rank-0.json").write_text(json.dumps(record | failure))


@pytest.mark.parametrize(("step", "phase"), [(3, "failed"), (-1, "cancelled")])
def test_a_save_that_fails_is_told_and_a_start_that_is_cut_short_is_none(clock, tmp_path, step, phase):
    leave(tmp_path, step)
    executor = Saving("running", after=["running", "failed"])
    script = replace(SCRIPT, run_dir=str(tmp_path), save_wait_s=60)
    assert stopped(executor, script)[0].phase == phase


@pytest.mark.parametrize("code", [errno.EIO, errno.EPIPE])
def test_a_terminal_or_reader_that_is_gone_ends_nothing_and_what_else_goes_wrong_does(code):
    lost = [code, errno.ENOSPC]

    def tick():
        raise OSError(lost[0], "")

    executor = Scripted("running", "succeeded")
    with stop_signals() as stop:
        assert follow(inside(executor), SCRIPT, stop, tick, print).phase == "succeeded"
        lost.pop(0)
        with pytest.raises(OSError, match="28"):
            follow(inside(executor), SCRIPT, stop, tick, print)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_stays_so_and_the_others_are_heard(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stop_signals() as stop:
            os.kill(os.getpid(), number)
            assert stop.signal is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal is signal.SIGTERM
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_the_handlers_of_before_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with stop_signals():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == before


def test_a_closed_terminal_is_a_request_to_stop():
    code = (
        "import os, signal\n"
        "from launcher.runs.watch import stop_signals\n"
        "with stop_signals() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(stop.exit_code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "129\n"


@pytest.mark.parametrize(("goes_on", "ends"), [(True, "told\n"), (False, "Broken pipe\n")])
def test_what_is_said_to_a_reader_that_has_gone_is_dropped_where_the_work_goes_on(goes_on, ends):
    code = (
        "import sys\n"
        "from launcher.app.output import Output\n"
        "sys.stdin.read()\n"
        "try:\n"
        f"    Output(goes_on={goes_on}).say('one')\n"
        "    Output().say('two')\n"
        "    print('told', file=sys.stderr)\n"
        "except BrokenPipeError as error:\n"
        "    print(error.strerror, file=sys.stderr)\n"
        "    import os; os._exit(0)\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        there(process.stdout).close()
        there(process.stdin).close()
        assert there(process.stderr).read() == ends
