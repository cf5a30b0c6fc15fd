import os
import signal
import subprocess
import sys

import pytest

from launcher.jobs.script import JobHandle, JobScript, JobState
from launcher.jobs.watch import follow, stop_requests

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


def test_a_job_is_followed_to_its_end_with_a_last_look_after_it():
    executor, ticks = Scripted("pending", "running", "running", "succeeded"), []
    with stop_requests() as stop:
        state = follow(executor, SCRIPT, stop, lambda: ticks.append(1))
    assert state.phase == "succeeded"
    assert len(ticks) == 4


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)]
)
def test_a_signal_ends_the_job_and_gives_the_shells_exit_code(number, code):
    executor = Scripted("running")
    with stop_requests() as stop:
        state = follow(executor, SCRIPT, stop, lambda: os.kill(os.getpid(), number))
    assert state == JobState(phase="cancelled", exit_code=code, reason=number.name)
    assert executor.cancelled == 1


def test_only_the_first_signal_counts():
    with stop_requests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is signal.SIGTERM


def test_whatever_happens_no_rank_is_left():
    executor = Scripted("running")

    def fail():
        raise BrokenPipeError

    with stop_requests() as stop, pytest.raises(BrokenPipeError):
        follow(executor, SCRIPT, stop, fail)
    assert executor.cancelled == 1


def test_the_handlers_of_before_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with stop_requests():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == before


def test_a_closed_terminal_is_a_request_to_stop():
    code = (
        "import os, signal\n"
        "from launcher.jobs.watch import stop_requests\n"
        "with stop_requests() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(stop.exit_code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "129\n"
