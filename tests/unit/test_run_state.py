import os

import pytest

from launcher.base import registry
from launcher.base.errors import JobError
from launcher.base.files import read_json
from launcher.contract.executor import Executor
from launcher.contract.job import JobHandle, JobState
from launcher.runs.state import current_state, load_handle, save_handle
from launcher.runs.store import RunDirectory


class Queue(Executor):
    """An executor that answers what it is told to."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def state(self, handle):
        self.asked.append(handle)
        return self.answers.pop(0)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path)


@pytest.fixture
def queue(monkeypatch):
    found = Queue()
    monkeypatch.setattr(registry, "load", lambda kind, name: found)
    return found


def submitted(directory, queue, *answers):
    queue.answers = list(answers)
    save_handle(directory, "slurm", JobHandle(id="7", run_dir=str(directory.path)))
    directory.write_status("pending")


def test_a_handle_comes_back_with_its_executor(directory, queue):
    assert load_handle(directory) is None
    submitted(directory, queue)
    assert load_handle(directory) == (queue, JobHandle(id="7", run_dir=str(directory.path)))


def test_what_the_scheduler_says_is_noted(directory, queue):
    submitted(directory, queue, JobState(phase="running"))
    assert current_state(directory).phase == "running"
    assert read_json(directory.status_file)["phase"] == "running"


def test_a_scheduler_is_not_asked_again_about_a_run_that_has_ended(directory, queue):
    ended = JobState(phase="failed", exit_code=17, reason="ended with exit code 17", rank=3)
    submitted(directory, queue, ended)
    assert [current_state(directory), current_state(directory)] == [ended, ended]
    assert len(queue.asked) == 1


def test_a_local_run_whose_launcher_is_gone_has_failed(directory, monkeypatch):
    directory.write_status("running")
    assert current_state(directory).phase == "running"
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
    directory.write_status("running")
    assert current_state(directory) == JobState(
        phase="failed", reason="the launcher that followed it is gone"
    )


def test_a_local_run_whose_launcher_is_gone_is_finished_where_all_is_saved(directory, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
    directory.write_status("running")
    directory.write("plan.json", '{"config": {"train": {"num_steps": 60}}}')
    (directory.path / "checkpoints" / "step-00000060").mkdir(parents=True)
    assert current_state(directory).phase == "succeeded"


def test_a_job_that_ends_by_a_signal_is_finished_where_all_is_saved(directory, queue):
    submitted(directory, queue, JobState(phase="failed", exit_code=-9, reason="killed by signal 9", rank=0))
    directory.write("plan.json", '{"config": {"train": {"num_steps": 60}}}')
    (directory.path / "checkpoints" / "step-00000060").mkdir(parents=True)
    assert current_state(directory).phase == "succeeded"
    assert read_json(directory.status_file)["phase"] == "succeeded"


def test_a_run_of_another_machine_is_taken_at_its_word(directory, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    directory.write_status("prepared")
    monkeypatch.undo()
    assert current_state(directory).phase == "pending"


def test_a_directory_without_a_status_says_so(directory):
    assert current_state(directory) == JobState(phase="failed", reason="it has no status.json")


def test_the_directory_of_a_waiting_job_is_not_used_again(directory, queue):
    from launcher.contract.job import RunConfig
    from launcher.runs.store import new_directory

    submitted(directory, queue)
    run = RunConfig(dir=str(directory.path), root="runs", timeout_s=60, start_timeout_s=60)
    with pytest.raises(
        JobError, match=r"belongs to job 7, .* trireme status .* trireme cancel .* ends it\.$"
    ):
        new_directory(run, "a", overwrite=True)
