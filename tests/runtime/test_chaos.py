"""A run whose ranks are killed again and again, and which goes on under one layout after another, computes
what an undisturbed one computes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.base.errors import JobError
from launcher.contract.plan import Plan
from launcher.runtime.checkpoint import saving
from launcher.runtime.checkpoint import store as checkpoint
from launcher.runtime.checkpoint.shard import save_shard
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train import loop
from launcher.runtime.train.loop import Trainer
from launcher.runtime.train.native_update import NativeUpdate
from tests.helpers.equality import CPU, job
from tests.helpers.objects import substitute
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.run_folders import make_folders

pytestmark = pytest.mark.usefixtures("deepspeed_in_parent")
NUM_STEPS, INTERVAL, NUM_KILLS = 24, 3, 5
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"dp": 2, "zero_stage": 3},
    {"tp": 2},
    {"pp": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"},
    {"dp": 2, "zero_stage": 1},
    {"pp": 2},
)
SOON_S = 10.0
"""Longest time from the death of a rank to the end of all."""
MOMENTS = ("in a step", "writing a shard", "completing")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL for one rank of a start."""

    rank: int
    step: int
    """Steps done by then, and while a checkpoint is made the one that it is of."""
    moment: str


def planned(layout: dict[str, Any]) -> Plan:
    train = {
        "num_steps": NUM_STEPS,
        "eval_batches": 0,
        "eval_interval": 0,
        "checkpoint_interval": INTERVAL,
        "keep_checkpoints": 1,
    }
    batch = {"global_size": 8, "micro_size": 2}
    return job(model={"vocab_size": 257, "dropout": 0.1}, batch=batch, parallel=layout, train=train)


def arm(kill: Kill, run_dir: Path) -> None:
    """Has this process be killed."""

    def die(*args: Any) -> None:
        (run_dir / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    begin, write, finish = Trainer.step, save_shard, checkpoint.complete

    def step(trainer: Trainer, number: int, *args: Any) -> Any:
        if number == kill.step:
            substitute(trainer.update, "apply", die)
        return begin(trainer, number, *args)

    def half(folder: Path, rank: int, *args: Any) -> int:
        if folder.stem != f"step-{kill.step:08d}":
            return write(folder, rank, *args)
        (folder / f"shard-{rank:05d}.safetensors").write_bytes(b"half of it")
        die()
        raise AssertionError("it outlived its end")

    def complete(root: Path, step: int, *args: Any, **named: Any) -> None:
        if step == kill.step:
            die()
        finish(root, step, *args, **named)

    if kill.moment == "in a step":
        substitute(Trainer, "step", step)
    elif kill.moment == "writing a shard":
        substitute(saving, "save_shard", half)
    else:
        substitute(checkpoint, "complete", complete)


def start(rank: int, plan: Plan, run_dir: Path, kill: Kill | None, sabotage: Callable[[], None]) -> None:
    """One start of the run, to its end or until a rank is killed."""
    make_folders(run_dir)
    if kill is not None and kill.rank == rank:
        arm(kill, run_dir)
    sabotage()
    ctx = make_context(plan.rank(rank), CPU)
    loop.train(ctx, run_dir, resume=saved_step(run_dir) > 0)
    torch.distributed.barrier()


def saved_step(run_dir: Path) -> int:
    try:
        step, skipped = checkpoint.newest(run_dir / "checkpoints")
    except JobError:
        return 0
    assert not skipped, "what is half written must not look like a checkpoint"
    return step


def a_kill(dice: random.Random, first: int, num_ranks: int, moments: Sequence[str]) -> Kill:
    """A kill of a start that goes on after step ``first``, behind the next checkpoint."""
    moment = dice.choice(moments)
    if moment == "in a step":
        step = first + INTERVAL + 1 + dice.randrange(INTERVAL)
        return Kill(rank=dice.randrange(num_ranks), step=step, moment=moment)
    return Kill(rank=0, step=first + 2 * INTERVAL, moment=moment)  # it has a shard under every layout


def run_with_kills(
    run_dir: Path,
    layouts: Sequence[dict[str, Any]],
    *,
    num_kills: int,
    moments: Sequence[str] = MOMENTS,
    sabotage: Callable[[], None] = lambda: None,
) -> list[int]:
    """Starts the run until it has come to its end; returns the steps that its starts went on from."""
    dice, begins = random.Random(11), [0]
    while (first := saved_step(run_dir)) < NUM_STEPS:
        plan = planned(layouts[(len(begins) - 1) % len(layouts)])
        is_killed = len(begins) <= num_kills
        kill = a_kill(dice, first, plan.world_size, moments) if is_killed else None
        try:
            run_ranks(plan.world_size, start, plan, run_dir, kill, sabotage)
        except RankError:
            assert is_killed, "nobody was killed, and the start failed"
            assert time.time() - (run_dir / "killed").stat().st_mtime < SOON_S
            (run_dir / "killed").unlink()
            begins.append(saved_step(run_dir))
    return begins


def recorded(run_dir: Path) -> Iterator[tuple[int, float]]:
    """Step and loss of every record of every start, of those that were made again, too."""
    for path in run_dir.glob("metrics/*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            if record["type"] == "step" and record["loss"] is not None:
                yield record["step"], record["loss"]


def assert_same_curve(found: Path, expected: Path) -> None:
    """Every step is there, and every record of it has the loss that it has in an undisturbed run."""
    whole, records = dict(recorded(expected)), sorted(recorded(found))
    assert {step for step, _ in records} == set(whole) == set(range(NUM_STEPS))
    losses = torch.tensor([loss for _, loss in records])
    torch.testing.assert_close(losses, torch.tensor([whole[step] for step, _ in records]), rtol=2e-5, atol=0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_with_kills(folder, LAYOUTS, num_kills=0) == [0]
    return folder


def test_a_run_that_is_killed_again_and_again_computes_the_same(undisturbed: Path, tmp_path: Path) -> None:
    begins = run_with_kills(tmp_path, LAYOUTS, num_kills=NUM_KILLS)
    assert len(begins) == NUM_KILLS + 1
    assert len(set(begins)) > NUM_KILLS / 2, "it was killed so early that hardly a start went on from another"
    assert_same_curve(tmp_path, undisturbed)


def read_the_data_from_its_beginning() -> None:
    steps = Loader.steps
    substitute(Loader, "steps", lambda loader, first: steps(loader, 0))


def lose_the_moments() -> None:
    load = NativeUpdate.load

    def forgetful(update: NativeUpdate, read: Any) -> None:
        load(update, lambda name, *box: read(name, *box) * (0 if name.startswith("exp_avg/") else 1))

    substitute(NativeUpdate, "load", forgetful)


@pytest.mark.parametrize("sabotage", [read_the_data_from_its_beginning, lose_the_moments])
def test_a_resume_that_loses_something_is_told_apart(
    sabotage: Callable[[], None], undisturbed: Path, tmp_path: Path
) -> None:
    moments = ["writing a shard"]
    begins = run_with_kills(tmp_path, [{}], num_kills=1, moments=moments, sabotage=sabotage)
    assert begins == [0, INTERVAL]
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_same_curve(tmp_path, undisturbed)
