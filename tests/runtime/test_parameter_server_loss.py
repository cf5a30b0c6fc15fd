"""A worker or a server that is gone, a run that is told to end, and one that goes on from a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.base.registry import resolve
from launcher.contract.job import STOP_NOTE
from launcher.contract.plan import Plan
from launcher.runtime.checkpoint.saving import restore
from launcher.runtime.checkpoint.store import newest
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer, train
from launcher_plugins.architectures.parameter_server.runtime.server import Server
from tests.helpers.equality import CPU, job
from tests.helpers.halves import MODEL, first_half, losses_of, second_half, uninterrupted
from tests.helpers.objects import substitute
from tests.helpers.ranks import RankError, Vanished, run_ranks
from tests.helpers.run_folders import make_folders
from tests.helpers.server_simulation import Simulation
from tests.helpers.servers import assert_same, rank_of_servers, records, serve_and_train, servers_job

STEPS = 4
SOON_S = 15.0
"""Half of the timeout after which ranks give each other up."""


def leave_early(trainer: Trainer, loader: Loader, step: int) -> None:
    """The second worker's process ends before its third step."""
    if trainer.ctx.plan.rank == 1 and step == 2:
        raise Vanished


def three_workers(**options: Any) -> Plan:
    return servers_job(
        workers=3, options=options, batch={"global_size": 6, "micro_size": 2}, train={"num_steps": STEPS}
    )


def test_lock_step_fails_soon_when_a_worker_is_gone(tmp_path: Path) -> None:
    begin = time.monotonic()
    message = r"worker 1 \(rank 1\) has failed after 2 steps; with architecture\.on_worker_loss=continue"
    with pytest.raises(RankError, match=message):
        serve_and_train(three_workers(), tmp_path, leave_early, num_steps=STEPS)
    assert time.monotonic() - begin < SOON_S


def test_lock_step_goes_on_with_the_others_where_it_may(tmp_path: Path) -> None:
    plan = three_workers(servers=2, on_worker_loss="continue")
    served = serve_and_train(plan, tmp_path, leave_early, num_steps=STEPS)
    assert [records(tmp_path, rank, "loss") for rank in (3, 4)] == [
        [{"type": "loss", "worker": 1, "step": 2}]
    ] * 2
    assert_same(served, Simulation(plan, served.updates, lost={1: 2}).run())
    with pytest.raises(AssertionError):
        assert_same(served, Simulation(plan, served.updates, lost={}).run())


def test_on_their_own_the_others_do_not_notice(tmp_path: Path) -> None:
    plan = three_workers(mode="async")
    served = serve_and_train(plan, tmp_path, leave_early, num_steps=STEPS)
    (updates,) = served.updates
    assert sorted((u["worker"], u["step"]) for u in updates) == [
        *((0, step) for step in range(STEPS)),
        *((1, step) for step in range(2)),
        *((2, step) for step in range(STEPS)),
    ]


def test_a_server_that_is_gone_is_told_clearly_and_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, seen = Server._handle, []

    def handle_some(server: Server, *notice: Any) -> None:
        seen.append(notice)
        if len(seen) == 20:
            raise EOFError
        handle(server, *notice)

    monkeypatch.setattr(Server, "_handle", handle_some)
    make_folders(tmp_path)
    plan, begin = servers_job(), time.monotonic()
    with pytest.raises(RankError, match="PeerError: a parameter server does not answer"):
        run_ranks(plan.world_size, until_the_server_ends, plan, tmp_path)
    assert time.monotonic() - begin < SOON_S


def until_the_server_ends(rank: int, plan: Plan, run_dir: Path) -> None:
    """The server's process ends without a word to anybody."""
    try:
        rank_of_servers(rank, plan, run_dir, None, STEPS, False)
    except EOFError:
        raise Vanished from None


# Checkpoints carry no architecture.


def half_with_servers(rank: int, plan: Plan, root: Path, resume: bool) -> list[float | None]:
    """The first or the second half of four steps, as `test_checkpoint` has them."""
    ctx = make_context(plan.rank(rank), CPU)
    run_dir = root.parent
    if ctx.plan.role.serve:
        resolve(ctx.plan.role.serve)(ctx, run_dir, resume=resume)
        return [None]
    trainer = Trainer(ctx)
    half = STEPS // 2
    first = restore(trainer.ctx, trainer.update, root) if resume else 0
    steps = Loader(ctx).steps(first)
    losses = [trainer.step(step, next(steps)).loss for step in range(first, first + half)]
    assert ctx.replicas is not None, "workers are replicas"
    ctx.replicas.leave(first + half)
    return losses


@pytest.mark.parametrize("servers_first", [True, False])
def test_training_goes_on_with_and_without_servers(servers_first: bool, tmp_path: Path) -> None:
    make_folders(tmp_path)
    root = tmp_path / "checkpoints"
    served = servers_job(model=MODEL, options={"servers": 2})
    alone = job(model=MODEL)
    expected = losses_of(run_ranks(1, uninterrupted, alone))
    if servers_first:
        losses = losses_of(run_ranks(served.world_size, half_with_servers, served, root, False)[:1])
        losses += losses_of(run_ranks(1, second_half, alone, root))
    else:
        losses = losses_of(run_ranks(1, first_half, alone, root))
        losses += losses_of(run_ranks(served.world_size, half_with_servers, served, root, True)[:1])
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-5, atol=0)


def told_to_end(rank: int, plan: Plan, run_dir: Path) -> int:
    """One worker is sent a signal in its third step. Returns the steps that this rank has recorded."""
    ctx = make_context(plan.rank(rank), CPU)
    if ctx.plan.role.serve:
        resolve(ctx.plan.role.serve)(ctx, run_dir, resume=False)
        return 0
    step = Trainer.step

    def stepping(trainer: Trainer, number: int, batches: Any) -> Any:
        if rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(trainer, number, batches)

    substitute(Trainer, "step", stepping)
    train(ctx, run_dir, resume=False)
    return len(records(run_dir, rank, "step"))


def test_workers_that_are_told_to_end_save_and_end_together(tmp_path: Path) -> None:
    make_folders(tmp_path)
    plan = servers_job(options={"servers": 2}, train={"num_steps": 50})
    assert run_ranks(plan.world_size, told_to_end, plan, tmp_path)[:2] == [3, 3]
    assert newest(tmp_path / "checkpoints") == (3, [])
    assert "SIGUSR1" in (tmp_path / STOP_NOTE).read_text()
