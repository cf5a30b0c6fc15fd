"""One start of a run at a time: processes that want its directory at once, are stopped, or are cut off."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from launcher.base import lock
from launcher.base.errors import JobError
from launcher.base.files import json_object
from launcher.base.lock import Lease
from launcher.contract.plan import Plan
from launcher.runs.claim import claimed, ranks_left
from launcher.runtime.process import presence
from launcher.runtime.process.heartbeat import HeartbeatWriter
from launcher.runtime.process.rank import make_context
from launcher.runtime.train import loop
from tests.helpers.configs import SMALL_RUN
from tests.helpers.equality import CPU, job
from tests.helpers.objects import substitute, there
from tests.helpers.run_folders import make_folders
from tests.helpers.waiting import at_this_load, wait_until

NUM_STARTS = 8
ENDLESS = ("train.num_steps=1000000", "train.checkpoint_interval=5", "--no-baseline")


def soon(condition: Callable[[], object]) -> None:
    wait_until(condition, timeout_s=at_this_load(60))


class Runs:
    """Starts verbs as processes of their own in a folder, in which git is slow."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder, self.text = folder, text
        self.started: list[subprocess.Popen[str]] = []
        (folder / "bin").mkdir()
        git = folder / "bin" / "git"
        git.write_text(f'#!/bin/sh\nsleep 0.2\nexec {shutil.which("git")} "$@"\n')
        git.chmod(0o755)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts the training with further words."""
        data = (f"data.source={self.text}", f"data.cache_dir={self.text.parent}/cache")
        return self.verb("run", "quickstart", *SMALL_RUN, *data, *ENDLESS, *words)

    def verb(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words],
            cwd=self.folder,
            env=os.environ | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        """Ends what is left."""
        for process in self.started:
            if process.poll() is None:
                process.terminate()
            process.communicate()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run that was stopped after some steps, and has saved."""
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "text.txt").write_text("In the beginning there was a little text, repeated. " * 200)
    runs = Runs(folder, folder / "text.txt")
    process = runs.start("run.dir=mine")
    soon(lambda: num_records(runs.folder / "mine") > 3)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130
    yield runs.folder / "mine"
    runs.close()


@pytest.fixture
def runs(interrupted: Path, tmp_path: Path) -> Iterator[Runs]:
    """With a copy of that run."""
    shutil.copytree(interrupted, tmp_path / "mine")
    runs = Runs(tmp_path, interrupted.with_name("text.txt"))
    yield runs
    runs.close()


def records(run: Path, rank: int = 1) -> list[dict[str, Any]]:
    path = run / "metrics" / f"rank-{rank:05}.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [record for line in lines if (record := json_object(line))]


def num_records(run: Path) -> int:
    return len(records(run))


def test_one_of_many_starts_at_once_gets_the_run_and_the_others_name_it(runs: Runs) -> None:
    run = runs.folder / "mine"
    before = num_records(run)
    starts = [runs.start("run.dir=mine", "--resume") for _ in range(NUM_STARTS)]
    soon(lambda: sum(start.poll() is not None for start in starts) >= NUM_STARTS - 1)
    (winner,) = (start for start in starts if start.poll() is None)
    for start in starts:
        if start is not winner:
            _, error = start.communicate()
            assert start.returncode == 2
            named = (
                rf"mine is in use by process {winner.pid} on {socket.gethostname()} since .*, which has not"
            )
            assert re.search(named, error), error
    soon(lambda: num_records(run) > before + 5)
    winner.send_signal(signal.SIGINT)
    assert winner.wait(300) == 130
    assert not (run / "lock").exists()
    steps = [record["step"] for record in records(run) if record["type"] == "step"]
    assert steps == list(range(len(steps)))
    assert sum(record["type"] == "header" for record in records(run)) == 2


def test_a_stopped_rank_whose_launcher_was_killed_keeps_the_run_until_it_is_cancelled(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.folder / "mine"
    before = num_records(run)
    process = runs.start("run.dir=mine", "--resume")
    soon(lambda: num_records(run) > before + 3)
    ranks = ranks_left(run)
    starter = int(Path(f"/proc/{ranks[1]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(ranks[1], signal.SIGSTOP)
    for pid in (process.pid, starter, ranks[0]):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    output, _ = runs.verb("status", "mine").communicate()
    assert f"the launcher that followed it is gone, and rank 1 (process {ranks[1]}) is left" in output
    monkeypatch.setattr(lock, "STILL_S", 0.5)
    with pytest.raises(JobError, match=rf"in use by rank 1 \(process {ranks[1]}\) of a start whose launcher"):
        claimed(run, lambda text: None)
    output, _ = runs.verb("cancel", "mine").communicate()
    assert output == "failed\n"
    assert ranks_left(run) == {}
    claimed(run, lambda text: None).release()


@pytest.mark.parametrize("is_covered", [False, True], ids=["moved", "mount lost"])
def test_a_run_whose_directory_is_gone_ends_naming_it_and_writes_nothing_there(
    runs: Runs, is_covered: bool
) -> None:
    run = runs.folder / "mine"
    before = num_records(run)
    process = runs.start("run.dir=mine", "--resume")
    soon(lambda: num_records(run) > before + 3)
    run.rename(runs.folder / "moved")
    if is_covered:
        run.mkdir()
    _, error = process.communicate(timeout=300)
    assert process.returncode == 2
    assert (
        f"{run} on {socket.gethostname()} is no longer the folder that this process held: its lock" in error
    )
    assert ranks_left(runs.folder / "moved") == {}
    assert list(run.iterdir()) == [] if is_covered else not run.exists()
    said = (runs.folder / "moved" / "logs" / "executor.log").read_text()
    assert re.search(rf"rank \d ends: {run} on {socket.gethostname()} is no longer", said)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted by this user")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_named_with_the_rank_and_the_path_and_blocks_no_later_start(
    runs: Runs, small_disk: Path
) -> None:
    run = small_disk / "mine"
    shutil.copytree(runs.folder / "mine", run)
    before = num_records(run)
    process = runs.start(f"run.dir={run}", "--resume", "train.checkpoint_interval=100000")
    soon(lambda: num_records(run) > before + 3)
    with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(512))
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    full = r"\[Errno 28\] No space left on device: "
    place = rf"'{run}/metrics/rank-0000\d\.jsonl' on {socket.gethostname()}\n"
    assert re.search(rf"^rank \d failed: {full}{place}", error, re.MULTILINE), error
    refused = runs.start(f"run.dir={small_disk}/other")
    _, error = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "No space left on device" in error or "a checkpoint takes about" in error
    assert not (small_disk / "other").exists()
    (small_disk / "filler").unlink()
    before = num_records(run)
    process = runs.start(f"run.dir={run}", "--resume")
    soon(lambda: num_records(run) > before + 3)
    process.terminate()
    process.wait()


# Ranks whose lock another host takes over


def forever(rank: int, plan: Plan, run_dir: Path, token: str, prepare: Callable[[], None]) -> None:
    """A rank that trains without an end, as a part of its run's lock."""
    os.environ["TRIREME_LOCK"] = token
    prepare()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    lease = presence.joined(run_dir, rank, 2)
    heart = HeartbeatWriter(run_dir, rank, 300.0, 300.0, lease)
    loop.train(make_context(plan.rank(rank), CPU, heart), run_dir, resume=False)


def without_looking() -> None:
    substitute(Lease, "check", lambda lease, **words: None)
    substitute(lock._Watch, "run", lambda watch: None)


def written(run_dir: Path) -> dict[str, int]:
    """Everything below a run directory, with its time."""
    return {str(path): path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != "lock"}


@pytest.fixture
def start_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ForkProcess]]:
    """Starts a rank in a run directory whose lock another process has taken; all look often at it."""
    for name, value in (("INTERVAL_S", 0.2), ("STILL_S", 1.5)):
        monkeypatch.setattr(lock, name, value)
    make_folders(tmp_path)
    token, started = lock.place(tmp_path), []

    def start(prepare: Callable[[], None] = lambda: None) -> ForkProcess:
        train = {"num_steps": 10**6, "eval_batches": 0, "eval_interval": 0, "checkpoint_interval": 2}
        rank = get_context("fork").Process(
            target=forever, args=(0, job(train=train), tmp_path, token, prepare)
        )
        rank.start()
        started.append(rank)
        return rank

    yield start
    for rank in started:
        rank.kill()
        rank.join()


def writes_after_a_stop(run_dir: Path, rank: ForkProcess) -> bool:
    """Whether a rank that was stopped writes after another host has taken over."""
    soon(lambda: len(records(run_dir, 0)) > 5 and list(run_dir.glob("checkpoints/step-????????")))
    os.kill(rank.pid or 0, signal.SIGSTOP)
    file = run_dir / "lock"
    file.write_text(file.read_text().replace(socket.gethostname(), "elsewhere"))
    said: list[str] = []
    lease = claimed(run_dir, said.append)
    assert "still runs" in said[0]
    before = written(run_dir)
    os.kill(rank.pid or 0, signal.SIGCONT)
    soon(lambda: rank.exitcode is not None or written(run_dir) != before)
    has_written = written(run_dir) != before
    lease.release()
    return has_written


def test_a_stopped_rank_that_comes_back_after_another_has_the_run_writes_nothing(
    tmp_path: Path, start_rank: Callable[..., ForkProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    rank = start_rank()
    assert not writes_after_a_stop(tmp_path, rank)
    rank.join()
    assert rank.exitcode == 1
    assert f"rank 0 ends: {tmp_path} on {socket.gethostname()} is no longer" in capfd.readouterr().err


def test_without_looking_at_the_lock_it_would_write(
    tmp_path: Path, start_rank: Callable[..., ForkProcess]
) -> None:
    assert writes_after_a_stop(tmp_path, start_rank(without_looking))


def test_a_rank_that_trains_raises_the_counter_when_its_launcher_is_gone(
    tmp_path: Path, start_rank: Callable[..., ForkProcess]
) -> None:
    rank = start_rank()
    soon(lambda: int(lock.holder_of(there(lock.read(tmp_path))).beat) > 3)
    (tmp_path / "lock").unlink()
    rank.join()
    assert rank.exitcode == 1
