import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.errors import PlanError
from launcher.contract.job import ENTRY_MODULE, EXECUTOR_LOG, JobHandle, JobRequest, JobScript, JobState
from launcher.runs.render import render
from launcher_plugins.executors import torchrun
from launcher_plugins.executors.torchrun import Torchrun, failed_state
from tests.helpers.objects import there
from tests.helpers.waiting import wait_until

REQUEST = JobRequest(run_dir="/runs/a b", plan_sha256="5a" * 32, python="/venv/bin/python")

REPORT = """\
E0101 api.py:1] failed (exitcode: 1) local_rank: 0 (pid: 11) of binary: /venv/bin/python
============================================================
launcher.runtime.process.main FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-01-02_03:04:05
  host      : localhost
  rank      : 2 (local_rank: 2)
  exitcode  : {other} (pid: 13)
  error_file: <N/A>
  traceback : To enable traceback see: a page
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-01-02_03:04:05
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : {root} (pid: 11)
  error_file: <N/A>
  traceback : To enable traceback see: a page
============================================================
"""

STARTER = """
import pathlib, signal, subprocess, sys, time
rank = [sys.executable, "-c", sys.argv[1], "launcher.runtime.process.main", sys.argv[2]]
process = subprocess.Popen(rank, start_new_session=True)
pathlib.Path(sys.argv[3]).write_text(str(process.pid))
time.sleep(60)
"""
STUBBORN_RANK = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ignores_sigterm(pid):
    return ignored(pid, signal.SIGTERM)


def ignored(pid, number):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(mask >> (number - 1) & 1)


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def start(run_dir, *argv):
    return Torchrun().submit(JobScript(argv=argv, environment={"GIVEN": "yes"}, run_dir=str(run_dir)))


def start_with_a_stubborn_rank(run_dir):
    pid_file = run_dir / "pid"
    plan = f"{run_dir}/plan.json"
    handle = start(run_dir, sys.executable, "-c", STARTER, STUBBORN_RANK, plan, str(pid_file), ENTRY_MODULE)
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    wait_until(lambda: ignores_sigterm(int(pid_file.read_text())))
    return handle, int(pid_file.read_text())


def test_the_command_names_no_port_and_passes_hash_and_plan(make_plan):
    script = Torchrun().render(make_plan("parallel.pp=2"), REQUEST)
    assert script.argv == (
        "/venv/bin/python",
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--rdzv-backend=trireme-one-host",
        "--log-dir=/runs/a b/logs/torchrun",
        "--module",
        "launcher.runtime.process.main",
        "/runs/a b/plan.json",
        "--sha256",
        "5a" * 32,
    )
    assert script.environment == {
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def test_rendering_does_not_depend_on_the_environment(make_plan, monkeypatch):
    plan = make_plan()
    before = Torchrun().render(plan, REQUEST)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert Torchrun().render(plan, REQUEST) == before


def test_resume_is_passed_to_the_ranks(make_plan):
    script = Torchrun().render(make_plan(), replace(REQUEST, resume=True))
    assert script.argv[-1] == "--resume"


def test_restarts_are_for_whoever_follows_the_job(make_plan):
    plan = make_plan("train.checkpoint_interval=5", "executor.max_restarts=3")
    assert Torchrun().render(plan, REQUEST).max_restarts == 3
    assert plan.notes[-1].endswith(
        "has failed after 4 times 600 s (run.timeout_s) without progress: 40 min 0 s; where it never makes "
        "a step, after 4 times 1800 s (run.start_timeout_s): 2 h 0 min."
    )
    assert Torchrun().render(make_plan(), REQUEST).max_restarts == 0


def test_cuda_ranks_keep_their_own_number_of_threads(make_plan):
    plan = make_plan()
    on_cuda = replace(plan.config, device=replace(plan.config.device, kind="cuda"))
    assert "OMP_NUM_THREADS" not in Torchrun().render(replace(plan, config=on_cuda), REQUEST).environment


def test_several_nodes_are_refused_with_the_way_out(make_plan):
    plan = make_plan()
    wide = replace(plan.config, cluster=replace(plan.config.cluster, nodes=2))
    with pytest.raises(PlanError, match=r"cluster\.nodes=2\. Set cluster\.nodes=1, or choose an"):
        render(replace(plan, config=wide), Path(REQUEST.run_dir))


def test_a_killed_rank_is_guilty_before_the_ranks_that_missed_it():
    assert failed_state(REPORT.format(root=1, other=-9), 1) == JobState(
        phase="failed", exit_code=-9, reason="killed by signal 9 (SIGKILL)", rank=2
    )


@pytest.mark.parametrize(
    "line", ["Unable to shutdown process 13 via 15, forcefully exiting", "trireme: killed process 13, which"]
)
def test_a_rank_that_was_killed_for_outliving_a_failure_is_not_guilty(line):
    state = failed_state(f"{line}\n" + REPORT.format(root=1, other=-9), 1)
    assert (state.rank, state.exit_code) == (0, 1)


def test_without_a_killed_rank_torchruns_first_one_is_guilty():
    assert failed_state(REPORT.format(root=3, other=-6), 1) == JobState(
        phase="failed", exit_code=3, reason="ended with exit code 3", rank=0
    )


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (9, "torchrun was killed by signal 9 (SIGKILL), as the kernel does when memory runs out"),
        (11, "torchrun was killed by signal 11 (SIGSEGV)"),
    ],
)
def test_a_starter_that_is_killed_is_told_by_the_name_of_the_signal(number, reason):
    assert failed_state("", -number) == JobState(phase="failed", exit_code=-number, reason=reason)


def test_a_starter_that_fails_by_itself_is_told_by_its_last_line():
    state = failed_state("usage: run.py\nrun.py: error: unrecognized arguments\n", 2)
    assert state == JobState(
        phase="failed",
        exit_code=2,
        reason="torchrun ended with exit code 2: run.py: error: unrecognized arguments",
    )


def test_a_job_runs_until_its_starter_ends(run_dir):
    handle = start(run_dir, sys.executable, "-c", "input(); print('done')")
    handle.process.wait(60)
    assert Torchrun().state(handle).phase == "failed"  # it has no input to read from
    waits = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    handle = start(run_dir, sys.executable, "-c", waits, str(run_dir / "told"))
    assert Torchrun().state(handle).phase == "running"
    (run_dir / "told").touch()
    handle.process.wait(60)
    assert Torchrun().state(handle) == JobState(phase="succeeded", exit_code=0)


def test_what_the_starter_prints_goes_to_its_log(run_dir):
    start(run_dir, sys.executable, "-c", "import os; print(os.environ['GIVEN'])").process.wait(60)
    assert (run_dir / EXECUTOR_LOG).read_text() == "yes\n"


def test_variables_that_change_torchrun_are_not_passed_on(run_dir, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    code = "import os; print('PET_NNODES' in os.environ, os.environ['CUDA_VISIBLE_DEVICES'])"
    start(run_dir, sys.executable, "-c", code).process.wait(60)
    assert (run_dir / EXECUTOR_LOG).read_text() == "False 4,5\n"


def test_cancel_ends_a_rank_that_ignores_sigterm_in_a_session_of_its_own(run_dir):
    handle, rank_pid = start_with_a_stubborn_rank(run_dir)
    assert is_alive(rank_pid)
    Torchrun().cancel(handle)
    assert handle.process.poll() == -signal.SIGTERM
    wait_until(lambda: not is_alive(rank_pid))


SAVING_RANK = """
import signal, sys, time
def save(*_):
    time.sleep(1)
    open(sys.argv[2] + ".saved", "x").close()
    sys.exit()
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
time.sleep(60)
"""


def test_ranks_are_told_to_end_themselves_and_not_by_their_starter(run_dir):
    starter = STARTER.replace("time.sleep(60)", "sys.exit(process.wait())")
    pid_file, plan = run_dir / "pid", f"{run_dir}/plan.json"
    handle = start(run_dir, sys.executable, "-c", starter, SAVING_RANK, plan, str(pid_file), ENTRY_MODULE)
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    wait_until(lambda: ignored(int(pid_file.read_text()), signal.SIGUSR2))
    Torchrun().request_stop(handle)
    assert handle.process.wait(60) == 0
    assert Path(f"{plan}.saved").exists()


def test_a_starter_that_has_no_ranks_yet_is_ended_when_they_are_told(run_dir):
    handle = start(run_dir, sys.executable, "-c", "import time; time.sleep(60)")
    Torchrun().request_stop(handle)
    assert handle.process.wait(60) == -signal.SIGTERM


def test_ranks_that_save_are_waited_for_as_long_as_the_recipe_says(make_plan):
    saves = "train.checkpoint_interval=5"
    assert Torchrun().render(make_plan(saves), REQUEST).save_wait_s == 600
    assert Torchrun().render(make_plan(saves, "executor.save_wait_s=30"), REQUEST).save_wait_s == 30
    assert Torchrun().render(make_plan(), REQUEST).save_wait_s == 0


def test_cancel_ends_a_starter_that_does_not_listen(run_dir, monkeypatch):
    monkeypatch.setattr(torchrun, "_GRACE_S", 0.1)
    handle = start(run_dir, sys.executable, "-c", STUBBORN_RANK)
    wait_until(lambda: ignores_sigterm(handle.id))
    Torchrun().cancel(handle)
    assert handle.process.poll() == -signal.SIGKILL


def test_ranks_that_outlive_a_failure_are_ended(run_dir, monkeypatch):
    monkeypatch.setattr(torchrun, "_SURVIVAL_S", 0.2)
    handle, rank_pid = start_with_a_stubborn_rank(run_dir)
    log, executor = run_dir / EXECUTOR_LOG, Torchrun()
    hour_s = 3600
    for text, times, lives in (
        ("a warning\n", (time.time() - hour_s,) * 2, True),
        (f"Sending process {rank_pid} closing signal SIGTERM\n", (time.time() + hour_s,) * 2, False),
    ):
        log.write_text(text)
        assert executor.state(handle).phase == "running"
        os.utime(log, times)  # the wall clock was set, which is no sign of life but once
        wait_until(lambda: executor._quiet_s(handle, log) > 0.2)
        assert is_alive(rank_pid)
        assert executor.state(handle).phase == "running"
        if not lives:
            wait_until(lambda: not is_alive(rank_pid))
        assert is_alive(rank_pid) is lives
    assert f"killed process {rank_pid}, which survived" in log.read_text()
    Torchrun().cancel(handle)


def test_cancel_leaves_the_ranks_of_another_run_alone(run_dir, tmp_path_factory):
    other_dir = tmp_path_factory.mktemp("other")
    (other_dir / "logs").mkdir()
    other, other_rank = start_with_a_stubborn_rank(other_dir)
    handle, _ = start_with_a_stubborn_rank(run_dir)
    Torchrun().cancel(handle)
    assert is_alive(other_rank)
    Torchrun().cancel(other)


def test_cancel_after_the_end_does_nothing(run_dir):
    handle = start(run_dir, sys.executable, "-c", "")
    handle.process.wait(60)
    Torchrun().cancel(handle)
    assert Torchrun().state(handle).phase == "succeeded"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_job_ends_when_its_launcher_is_killed(run_dir):
    code = (
        "import sys, time\n"
        "from launcher_plugins.executors.torchrun import Torchrun\n"
        "from launcher.contract.job import JobScript\n"
        "argv = (sys.executable, '-c', 'import time; time.sleep(60)')\n"
        f"handle = Torchrun().submit(JobScript(argv=argv, environment={{}}, run_dir={str(run_dir)!r}))\n"
        "print(handle.id, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        job_pid = int(there(launcher.stdout).readline())
        assert is_alive(job_pid)
        os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(job_pid))


def test_a_job_of_another_process_is_not_followed():
    with pytest.raises(AssertionError, match="followed by the process that started it"):
        Torchrun().state(JobHandle(id="1", run_dir="/runs/a"))
