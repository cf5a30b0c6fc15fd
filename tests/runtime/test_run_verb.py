"""`trireme run` with real ranks: it ends well, it fails telling why, and it leaves no process."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.helpers.configs import SMALL_RUN
from tests.helpers.sockets import listening
from tests.helpers.waiting import at_this_load, wait_until

ENDLESS = "train.num_steps=1000000"
LOOPBACK = {"127.0.0.1", "::1"}
SOON_S = 10.0
"""Longest time from the failure of a rank to the end of all, on an idle machine."""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("In the beginning there was a little text, and it was repeated. " * 200)
    return path


@pytest.fixture
def start(tmp_path, text):
    """Starts the verb as a process of its own in a fresh folder."""
    started = []

    def run(*words, **options):
        is_text = not any(word.startswith("data.target=") for word in words)
        data = (
            [f"data.source={text}", f"data.cache_dir={tmp_path}/cache"] if is_text else ["data.source=null"]
        )
        command = [sys.executable, "-m", "launcher", "run", "quickstart", *SMALL_RUN, *data, *words]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        process = subprocess.Popen(command, cwd=tmp_path, text=True, **streams)
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate()


def rank_pids(run_dir):
    """Process of each rank, by its command line and environment."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = dict(
                item.partition(b"=")[::2] for item in (folder / "environ").read_bytes().split(b"\0")
            )
        except OSError:
            continue
        if os.fsencode(f"{run_dir}/plan.json") in words and b"LOCAL_RANK" in variables:
            pids[int(variables[b"RANK"])] = int(folder.name)
    return pids


def parent_pid(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for_steps(run_dir):
    """Waits until the reporting rank has recorded a step."""
    records = run_dir / "metrics" / "rank-00001.jsonl"
    wait_until(lambda: records.is_file() and '"step"' in records.read_text(), "a step")


def phase(run_dir):
    return json.loads((run_dir / "status.json").read_text())["phase"]


def ignore_hangups():
    """As nohup starts a program, and a shell one in the background."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def hang_up(process, run_dir):
    """Sends the signals of a terminal to the launcher, torchrun and the ranks."""
    ranks = list(rank_pids(run_dir).values())
    (starter,) = set(map(parent_pid, ranks))
    for number in (signal.SIGHUP, signal.SIGINT):
        for pid in (process.pid, starter, *ranks):
            os.kill(pid, number)


def test_what_listens_to_all_hosts_is_found():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert listening([os.getpid()]) - LOOPBACK, store


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="ranks are found through /proc")
def test_two_runs_at_once_share_a_machine_and_ctrl_c_ends_only_its_own(start, tmp_path):
    """The second is started as by nohup: neither signals of its terminal end it, nor the loss of that."""
    terminal, stdout = pty.openpty()
    first = start(ENDLESS, "run.dir=first", "--no-baseline")
    second = start(ENDLESS, "run.dir=second", "--no-baseline", stdout=stdout, preexec_fn=ignore_hangups)
    os.close(stdout)
    wait_for_steps(tmp_path / "first")
    wait_for_steps(tmp_path / "second")
    ranks = rank_pids(tmp_path / "first").values()
    assert listening([*ranks])  # gloo's connections
    assert listening([*ranks]) <= LOOPBACK
    assert listening([first.pid, *map(parent_pid, ranks)]) == set()  # the launcher and torchrun
    first.send_signal(signal.SIGINT)
    _, error = first.communicate(timeout=300)
    assert (first.returncode, error) == (
        130,
        "stopped by SIGINT: all ranks have ended. Run directory: first\n"
        "Nothing is saved, as train.checkpoint_interval is 0.\n",
    )
    assert rank_pids(tmp_path / "first") == {}
    assert phase(tmp_path / "first") == "cancelled"
    hang_up(second, tmp_path / "second")
    os.close(terminal)
    num_done = len(losses(tmp_path / "second"))
    wait_until(lambda: len(losses(tmp_path / "second")) > num_done + 50)
    assert sorted(rank_pids(tmp_path / "second")) == [0, 1]

    os.kill(rank_pids(tmp_path / "second")[0], signal.SIGSTOP)  # this one does not end by itself
    os.kill(rank_pids(tmp_path / "second")[1], signal.SIGKILL)
    killed_at = time.monotonic()
    _, error = second.communicate(timeout=300)
    assert time.monotonic() - killed_at < at_this_load(SOON_S)
    assert second.returncode == 1
    assert error.startswith("rank 1 failed: killed by signal 9 (SIGKILL)\n")
    assert "torch.distributed" not in error
    assert rank_pids(tmp_path / "second") == {}
    assert phase(tmp_path / "second") == "failed"


def losses(run_dir):
    """The loss of each step, from whichever ranks know it."""
    lines = [line for path in run_dir.glob("metrics/rank-*") for line in path.read_text().split("\n")[:-1]]
    steps = [record for record in map(json.loads, lines) if record["type"] == "step"]
    return [loss for _, loss in sorted({(s["step"], s["loss"]) for s in steps if s["loss"] is not None})]


def test_eight_ranks_over_all_axes_train_as_their_baseline_and_end_in_the_speedup_table(start, tmp_path):
    axes = ("parallel.dp=2", "parallel.tp=2", "parallel.pp=2")
    process = start("train.num_steps=4", "run.root=runs", *axes)
    output, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    assert "step 4/4" in output
    assert "speedup" in output.lower()
    base, run = sorted((tmp_path / "runs").iterdir(), key=lambda path: "baseline" not in path.name)
    assert (phase(base), phase(run)) == ("succeeded", "succeeded")
    assert len(list(run.glob("metrics/rank-*"))) == 8
    assert losses(run) == pytest.approx(losses(base), rel=2e-5)


def test_an_interrupted_run_saves_first_and_goes_on_from_there(start, tmp_path):
    words = (ENDLESS, "run.dir=mine", "train.checkpoint_interval=1000000", "--no-baseline")
    log = tmp_path / "mine" / "logs" / "rank-0.log"
    first = start(*words)
    wait_for_steps(tmp_path / "mine")
    first.send_signal(signal.SIGINT)
    _, error = first.communicate(timeout=300)
    (saved,) = re.findall(r"\nSaved after step (\d+): --resume goes on from there\.\n", error)
    second = start(*words, "--resume")
    wait_until(lambda: log.is_file() and "resumed after step" in log.read_text(), "the resume")
    second.send_signal(signal.SIGTERM)
    output, _ = second.communicate(timeout=300)
    assert f"resumed after step {saved}\n" in log.read_text()
    assert f"Z resumed after step {saved}\n" in output


def start_with_loss(start, tmp_path, loss):
    """Starts two ranks with a model whose loss is an expression."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from types import SimpleNamespace\n"
        f"def loss(output, targets):\n    return {loss}\n"
        "def build():\n    return SimpleNamespace(layers=[torch.nn.Embedding(256, 8)], loss=loss)\n"
    )
    sizes = (f"model.{name}=null" for name in ("num_layers", "hidden_size", "num_heads"))
    model = ("model=custom", "model.target=mine:build", *sizes, "parallel.dp=2", "parallel.pp=1")
    return start("train.num_steps=4", "run.dir=mine", "--no-baseline", *model)


def test_a_rank_that_raises_is_shown_first_with_its_own_traceback(start, tmp_path):
    process = start_with_loss(start, tmp_path, "{}['no such planet']")
    _, error = process.communicate(timeout=300)
    raised_at = min(json.loads(path.read_text())["time"] for path in tmp_path.glob("mine/exit/rank-*.json"))
    assert time.time() - raised_at < at_this_load(SOON_S)
    assert process.returncode == 1
    assert " failed: KeyError: 'no such planet'\n\nTraceback (most recent call last)" in error
    assert error.startswith("rank ")
    assert "torch.distributed.elastic" not in error
    assert str(tmp_path / "mine" / "logs") in error


def test_a_rank_out_of_memory_is_named_as_such(start, tmp_path):
    _, error = start_with_loss(start, tmp_path, "torch.empty(1 << 60)").communicate(timeout=300)
    assert re.match(r"rank \d failed: out of memory", error)
    assert "A smaller batch.micro_size, parallel.recompute=full" in error


TIMEOUT_S = 5
HANGS_ONCE = """
import os, time, torch

class Texts:
    num_taken = 0

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        self.num_taken += 1
        if os.environ.get("RANK") == "1" and self.num_taken == 20 and not os.path.exists("hung"):
            open("hung", "x").close()
            time.sleep(3600)
        tokens = torch.arange(17) + index % 100
        return tokens[:-1], tokens[1:]
"""


def test_a_rank_that_hangs_is_named_and_the_run_goes_on_from_its_checkpoint(start, tmp_path):
    (tmp_path / "mine.py").write_text(HANGS_ONCE)
    words = ("data.target=mine:Texts", "parallel.pp=1", "parallel.dp=2")
    saves = ("train.num_steps=20", "train.checkpoint_interval=2", "executor.max_restarts=1")
    process = start(*words, *saves, f"run.timeout_s={TIMEOUT_S}", "run.dir=mine", "--no-baseline")
    output, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    assert re.search(r"\nrank 1 hung waiting for data of step \d+: not heard from for", output)
    assert re.search(r"\nrestart 1 of 1: resumed after step \d+", output)
    assert re.search(r"mine lost \d+ steps? with starts that failed", output)
    (set_aside,) = (tmp_path / "mine").glob("exit.*")
    assert set_aside.stat().st_ctime - (tmp_path / "hung").stat().st_mtime < TIMEOUT_S + at_this_load(SOON_S)
    assert len(losses(tmp_path / "mine")) >= 20


def test_the_group_may_read_a_shared_run_and_write_nothing_in_it(start, tmp_path):
    """A colleague reads the log, the measurements and the checkpoints, whatever the umask."""
    shared = ("site.group_access=read", "train.num_steps=4", "train.checkpoint_interval=2", "--no-baseline")
    process = start("run.dir=shared", *shared, preexec_fn=lambda: os.umask(0o077))
    _, error = process.communicate()
    assert process.returncode == 0, error
    run_dir = tmp_path / "shared"
    modes = {
        str(path.relative_to(run_dir)): path.stat().st_mode & 0o777 for path in [run_dir, *run_dir.rglob("*")]
    }
    alone = {name for name, mode in modes.items() if not mode & 0o040}
    assert {name for name in alone if not name.startswith("logs/torchrun/")} <= {"rendezvous"}
    assert not any(mode & 0o027 & ~0o050 for mode in modes.values())
    assert {"logs/rank-0.log", "metrics/rank-00000.jsonl", "checkpoints/step-00000004/shard-00000.json"} <= {
        *modes
    }
