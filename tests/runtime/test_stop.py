"""Ranks that are told to end save after one and the same step, and the run goes on from there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from launcher.contract.plan import Plan
from launcher.metrics.read import read_run
from launcher.runtime.checkpoint.saving import Saver
from launcher.runtime.process.rank import make_context
from launcher.runtime.process.stop import StopRequest
from launcher.runtime.train import loop
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import CPU, job
from tests.helpers.objects import substitute
from tests.helpers.ranks import run_ranks
from tests.helpers.run_folders import make_folders

NUM_STEPS = 6
Signals = Mapping[int, Mapping[int, signal.Signals]]
"""Rank -> step -> the signal that comes in the middle of it."""


class Told(Trainer):
    """A trainer to which signals come."""

    signals: Mapping[int, signal.Signals]

    def step(self, step, microbatches):
        if number := self.signals.get(step):
            os.kill(os.getpid(), number)
        return super().step(step, microbatches)


def planned(interval: int, **layout: int) -> Plan:
    train = {"num_steps": NUM_STEPS, "checkpoint_interval": interval, "eval_batches": 0, "eval_interval": 0}
    return job(parallel=layout, train=train, model={"dropout": 0.1})


def start(rank: int, plan: Plan, run_dir: Path, told: Signals) -> dict[str, object] | None:
    """One start of the run; the note that it leaves."""
    Told.signals = told.get(rank, {})
    substitute(loop, "Trainer", Told)
    substitute(loop, "StopRequest", partial(StopRequest, interval_s=0))
    has_saved = (run_dir / "checkpoints").exists()
    dist.barrier()
    loop.train(make_context(plan.rank(rank), CPU), run_dir, resume=has_saved)
    dist.barrier()
    path = run_dir / "exit" / "stopped.json"
    note = json.loads(path.read_text()) if path.exists() else None
    dist.barrier()
    path.unlink(missing_ok=True)
    return note


def starts(rank: int, plan: Plan, run_dir: Path, told: Sequence[Signals]) -> list[dict[str, object] | None]:
    """All starts of a run, in one process; their notes."""
    make_folders(run_dir)
    return [start(rank, plan, run_dir, signals) for signals in told]


def cut_and_whole(
    rank: int, plan: Plan, folder: Path, told: Sequence[Signals]
) -> list[dict[str, object] | None]:
    """A run that is cut short by signals, and one that is not."""
    for name in ("cut", "whole"):
        (folder / name).mkdir(exist_ok=True)
    starts(rank, plan, folder / "whole", [{}])
    return starts(rank, plan, folder / "cut", told)


def losses(run_dir: Path) -> dict[int, float]:
    """Of every step of every start; a step that was made twice would be an error of its own."""
    lines = (line for path in run_dir.glob("metrics/*.jsonl") for line in path.read_text().splitlines())
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if record["type"] == "step" and record["loss"] is not None]
    assert len({record["step"] for record in steps}) == len(steps)
    return {record["step"]: record["loss"] for record in steps}


def test_a_run_that_is_preempted_three_times_makes_every_step_once_and_the_same_losses(
    tmp_path: Path,
) -> None:
    told: list[Signals] = [
        {1: {0: signal.SIGUSR1}},
        {rank: {2: signal.SIGTERM} for rank in range(2)},
        {0: {3: signal.SIGTERM}, 1: {4: signal.SIGUSR1}},
        {},
    ]
    notes, _ = run_ranks(2, cut_and_whole, planned(interval=100, pp=2), tmp_path, told)
    assert notes == [
        {"step": 1, "signal": "SIGUSR1"},
        {"step": 3, "signal": "SIGTERM"},
        {"step": 4, "signal": "SIGTERM"},
        None,
    ]
    assert read_run(tmp_path / "cut").num_starts == 4
    cut, whole = losses(tmp_path / "cut"), losses(tmp_path / "whole")
    assert sorted(cut) == list(range(NUM_STEPS))
    torch.testing.assert_close(cut, whole, rtol=2e-5, atol=0)


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    told: list[Signals] = [{0: {NUM_STEPS - 1: signal.SIGTERM}}]
    assert run_ranks(1, starts, planned(interval=100), tmp_path, told) == [[None]]
    assert sorted(losses(tmp_path)) == list(range(NUM_STEPS))


def test_a_step_that_is_saved_anyway_is_not_saved_twice(tmp_path: Path) -> None:
    assert run_ranks(1, saved_steps, planned(interval=2), tmp_path) == [[2, 4]]


def saved_steps(rank: int, plan: Plan, run_dir: Path) -> list[int]:
    steps: list[int] = []
    save = Saver.save

    def noting(saver: Saver, step: int) -> None:
        steps.append(step)
        save(saver, step)

    substitute(Saver, "save", noting)
    starts(rank, plan, run_dir, [{0: {3: signal.SIGUSR1}}])
    return steps


def test_without_checkpoints_the_signals_keep_their_meaning(tmp_path: Path) -> None:
    run_ranks(1, unarmed, planned(interval=0), tmp_path)


def unarmed(rank: int, plan: Plan, run_dir: Path) -> None:
    starts(rank, plan, run_dir, [{}])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_ranks_with_short_steps_ask_each_other_only_now_and_then(tmp_path: Path) -> None:
    first, second = run_ranks(2, answers)
    assert first == second
    # After 1 step, then after the 4 that the slower rank lets pass in 0.4 s; told before the 9th.
    assert first == [False] * 8 + [True]


def answers(rank: int) -> list[bool]:
    stop = StopRequest(CPU, interval_s=0.4)
    stop.arm()
    given: list[bool] = []
    for _ in range(9):
        if rank == 1 and len(given) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        given.append(stop.agree(step_s=0.1 if rank else 0.04))
    return given
