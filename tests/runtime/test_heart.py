"""A rank that hangs ends within its timeout, and says where it was; one that is only slow goes on."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launcher.base.registry import resolve
from launcher.contract.heartbeat import heartbeat_name, unpack
from launcher.contract.plan import Plan
from launcher.runs.hang import find_hang
from launcher.runtime.model.build import build_chunks
from launcher.runtime.process.heartbeat import HeartbeatWriter
from launcher.runtime.process.rank import make_context
from launcher.runtime.train import loop
from launcher.runtime.train.loop import Trainer
from launcher_plugins.architectures.parameter_server.runtime import server
from launcher_plugins.architectures.parameter_server.runtime.shard import Piece
from tests.helpers.equality import CPU, job
from tests.helpers.objects import substitute, there
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.run_folders import make_folders
from tests.helpers.servers import servers_job
from tests.helpers.waiting import at_this_load, wait_until

TIMEOUT_S = 2.5
START_TIMEOUT_S = 20.0
LONG_TIMEOUT_S = 5.0
"""Far longer than a busy machine may hold a rank up."""


def planned(**layout: int) -> Plan:
    train = {"num_steps": 3, "checkpoint_interval": 9, "eval_batches": 0, "eval_interval": 0}
    return job(model={"num_layers": 2}, parallel=layout, train=train)


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def sleep_in_c_with_pythons_lock() -> None:
    ctypes.PyDLL(None).sleep(60)


def be_slow() -> None:
    time.sleep(LONG_TIMEOUT_S * 0.55)


def trained(
    rank: int,
    plan: Plan,
    run_dir: Path,
    doing: Callable[[], None],
    guilty: int,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """A run whose rank ``guilty`` does something else in the middle of each step from the second on."""
    make_folders(run_dir)
    begin = Trainer.step

    def step(trainer: Trainer, number: int, *args: Any) -> Any:
        substitute(trainer.update, "begin", lambda step: doing() if rank == guilty and step else None)
        return begin(trainer, number, *args)

    substitute(Trainer, "step", step)
    heart = HeartbeatWriter(run_dir, rank, timeout_s, START_TIMEOUT_S)
    loop.train(make_context(plan.rank(rank), CPU, heart), run_dir, resume=False)
    dist.barrier()
    heart.close()


@pytest.mark.parametrize(
    ("layout", "doing"),
    [({"dp": 2}, sleep_for_ever), ({"pp": 2}, sleep_in_c_with_pythons_lock)],
    ids=["in python", "in C"],
)
def test_all_ranks_end_when_one_hangs_and_it_is_named_with_its_place(
    layout: dict[str, int], doing: Callable[[], None], tmp_path: Path
) -> None:
    """It is armed against SIGTERM, and nobody ends it: its watchdog does."""
    with pytest.raises(RankError, match=r"died without an answer|closed by peer|reset by peer"):
        run_ranks(2, trained, planned(**layout), tmp_path, doing, 1)
    hang = there(find_hang(tmp_path))
    assert (hang.rank, hang.heartbeat.step, hang.heartbeat.is_waiting) == (1, 1, False)
    assert hang.silent_s < TIMEOUT_S + at_this_load(3)
    assert doing.__name__ in hang.stack


def test_a_rank_alone_that_hangs_ends_too(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 died without an answer"):
        run_ranks(1, trained, planned(), tmp_path, sleep_for_ever, 0)
    assert there(find_hang(tmp_path)).rank == 0


def test_a_rank_that_is_slow_goes_on_and_leaves_no_file(tmp_path: Path) -> None:
    run_ranks(2, trained, planned(dp=2), tmp_path, be_slow, 1, LONG_TIMEOUT_S)
    assert list(tmp_path.glob("exit/*")) == []
    assert find_hang(tmp_path) is None


def without_beats(rank: int, plan: Plan, run_dir: Path) -> None:
    substitute(HeartbeatWriter, "beat", lambda heart, doing: None)
    trained(rank, plan, run_dir, be_slow, 0, LONG_TIMEOUT_S)


def test_a_rank_whose_beats_are_lost_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 died without an answer"):
        run_ranks(1, without_beats, planned(), tmp_path)


def stop_itself() -> None:
    signal.raise_signal(signal.SIGSTOP)


def test_a_rank_that_is_stopped_by_the_system_is_named_by_those_that_waited(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(2, trained, planned(dp=2), tmp_path, stop_itself, 1, timeout_s=7)
    assert there(find_hang(tmp_path)).rank == 1


START_S = 3.0
"""What the ranks have until their first step."""


def started(rank: int, plan: Plan, run_dir: Path) -> None:
    """A run whose rank 1 hangs while it makes its model."""
    make_folders(run_dir)
    substitute(loop, "build_chunks", lambda ctx: sleep_for_ever() if rank == 1 else build_chunks(ctx))
    heart = HeartbeatWriter(run_dir, rank, LONG_TIMEOUT_S, START_S)
    loop.train(make_context(plan.rank(rank), CPU, heart), run_dir, resume=False)


def test_a_rank_that_hangs_before_its_first_step_ends_all_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(2, started, planned(dp=2), tmp_path)
    hang = there(find_hang(tmp_path))
    assert (hang.rank, hang.heartbeat.doing, hang.heartbeat.step) == (1, "building", -1)
    assert "sleep_for_ever" in hang.stack
    assert hang.silent_s < START_S + at_this_load(3)


LAZY_PROGRAM = """
import sys, time
from launcher.runtime.process import main
main.read_plan = lambda path, sha256: main.Plan.from_json(path.read_text())
main.registry.resolve = lambda name: time.sleep(60)
main.main([sys.argv[1], "--sha256", "0"])
"""


def test_a_rank_whose_libraries_do_not_load_ends_too(tmp_path: Path) -> None:
    plan = job(model={"num_layers": 2}, run={"start_timeout_s": 1.0})
    make_folders(tmp_path)
    (tmp_path / "plan.json").write_text(plan.to_json())
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", LAZY_PROGRAM, str(tmp_path / "plan.json")]
    assert subprocess.run(command, env=environment, timeout=30, check=False).returncode == 1
    hang = there(find_hang(tmp_path))
    assert str(hang).startswith("hung in its start: no step within run.start_timeout_s")
    assert "main.py" in hang.stack


# Parameter servers: rank 2 is one.
SERVER_TIMEOUT_S = 3.5


def served(rank: int, plan: Plan, run_dir: Path, sabotage: Callable[[], None]) -> None:
    """A run with a server."""
    make_folders(run_dir)
    sabotage()
    is_server = plan.rank(rank).role.serve
    heart = HeartbeatWriter(
        run_dir, rank, SERVER_TIMEOUT_S if is_server else START_TIMEOUT_S, START_TIMEOUT_S
    )
    ctx = make_context(plan.rank(rank), CPU, heart)
    (resolve(is_server) if is_server else loop.train)(ctx, run_dir, resume=False)
    heart.close()


def hang_in_an_update() -> None:
    substitute(Piece, "update", lambda *_: sleep_for_ever())


def test_a_server_that_hangs_ends_all_and_is_named(tmp_path: Path) -> None:
    plan = servers_job(train={"num_steps": 3})
    with pytest.raises(RankError):
        run_ranks(plan.world_size, served, plan, tmp_path, hang_in_an_update)
    hang = there(find_hang(tmp_path))
    assert (hang.rank, hang.heartbeat.doing) == (2, "updating")
    assert "sleep_for_ever" in hang.stack


def let_the_server_wait() -> None:
    """Longer than the timeout, for workers that are slow and well in their second step."""
    begin = Trainer.step

    def step(trainer: Trainer, number: int, *args: Any) -> Any:
        for _ in range(8 * number):
            trainer.ctx.clock.beat()
            time.sleep(SERVER_TIMEOUT_S * 0.16)
        return begin(trainer, number, *args)

    substitute(Trainer, "step", step)


def test_a_server_that_waits_for_slow_workers_goes_on(tmp_path: Path) -> None:
    plan = servers_job(train={"num_steps": 2})
    run_ranks(plan.world_size, served, plan, tmp_path, let_the_server_wait)
    assert find_hang(tmp_path) is None


def wait_without_a_beat() -> None:
    let_the_server_wait()
    substitute(server, "_BEAT_INTERVAL_S", 60)


def test_a_server_that_waits_without_a_beat_would_be_ended(tmp_path: Path) -> None:
    plan = servers_job(train={"num_steps": 2})
    with pytest.raises(RankError):
        run_ranks(plan.world_size, served, plan, tmp_path, wait_without_a_beat)
    assert there(find_hang(tmp_path)).rank == 2


def stopped_for(seconds: float, run_dir: Path, out: int) -> None:
    """A rank that waits, whose process is stopped and goes on."""
    heart = HeartbeatWriter(run_dir, 0, 60.0, 60.0)
    heart.beat("dp")
    os.write(out, b"1")
    time.sleep(seconds)


def test_a_process_that_waits_proves_that_it_runs_and_one_that_was_stopped_that_it_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.runtime.process.heartbeat._ALIVE_INTERVAL_S", 0.05)
    monkeypatch.setattr("launcher.runtime.process.heartbeat.STOPPED_S", 0.5)
    ready, out = os.pipe()
    if (child := os.fork()) == 0:
        stopped_for(60.0, tmp_path, out)
        os._exit(0)
    try:
        os.read(ready, 1)
        path = tmp_path / heartbeat_name(0)
        wait_until(lambda: unpack(path.read_bytes()).alive_s > 0.1)
        assert unpack(path.read_bytes()).woke == 0
        os.kill(child, signal.SIGSTOP)
        seen = unpack(path.read_bytes()).alive_s
        time.sleep(1.0)
        assert unpack(path.read_bytes()).alive_s <= seen + 0.1
        os.kill(child, signal.SIGCONT)
        wait_until(lambda: unpack(path.read_bytes()).woke > 0)
        assert unpack(path.read_bytes()).stopped_s == pytest.approx(1.0, abs=0.45)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(out)
