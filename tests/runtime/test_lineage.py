"""A run that goes on from a step of its past, and one that begins with a checkpoint of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.contract.plan import Plan
from launcher.runs.resume import set_aside_newer
from launcher.runs.store import RunDirectory, saved_steps
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import job
from tests.helpers.objects import substitute
from tests.helpers.ranks import RankError, run_ranks
from tests.runtime.test_saving import saved, trained

NUM_STEPS, BACK_TO, CRASHES_IN = 8, 2, 5
"""The steps of a run that saves every second, the one it goes back to, and one that ends it."""


def planned(*, num_steps: int = NUM_STEPS, dp: int = 2, pp: int = 1, **train: Any) -> Plan:
    train = {
        "num_steps": num_steps,
        "eval_batches": 0,
        "eval_interval": 0,
        "checkpoint_interval": 2,
        "keep_checkpoints": 9,
        "async_checkpoint": False,  # what is due when a rank crashes is there
        **train,
    }
    model = {"num_layers": 2, "vocab_size": 257, "dropout": 0.1}
    return job(model=model, parallel={"dp": dp, "pp": pp}, train=train)


def crash(rank: int) -> None:
    begin = Trainer.step

    def step(trainer: Trainer, number: int, *args: Any) -> Any:
        if number == CRASHES_IN:
            raise RuntimeError("the crash of the new line")
        return begin(trainer, number, *args)

    substitute(Trainer, "step", step)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(2, trained, planned(), folder)
    return folder


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Step and loss of every step of every start, in the order in which they were made."""
    lines = (run_dir / "metrics" / "rank-00000.jsonl").read_text().splitlines()
    return [(each["step"], each["loss"]) for each in map(json.loads, lines) if each["type"] == "step"]


def went_on_from(run_dir: Path) -> int:
    return int(json.loads((run_dir / "exit" / "resumed.json").read_text())["step"])


def goes_back_and_crashes(run_dir: Path, *, sets_aside: bool) -> None:
    """A whole run, then a start that goes on from `BACK_TO`, if the newer ones are set aside, and crashes,
    then one that goes on from whatever is the newest, as a requeued job does."""
    run_ranks(2, trained, planned(), run_dir)
    if sets_aside:
        assert set_aside_newer(RunDirectory(run_dir), BACK_TO)[0] == [4, 6, 8]
    try:
        run_ranks(2, trained, planned(), run_dir, crash, True)
    except RankError as error:
        assert "the crash of the new line" in str(error)  # noqa: PT017 (it comes in one of two cases)
        assert went_on_from(run_dir) == BACK_TO
        assert saved_steps(run_dir) == [2, 4]
    run_ranks(2, trained, planned(), run_dir, None, True)


def test_a_run_that_goes_back_goes_on_along_its_new_line_as_an_undisturbed_one(
    undisturbed: Path, tmp_path: Path
) -> None:
    goes_back_and_crashes(tmp_path, sets_aside=True)
    assert went_on_from(tmp_path) == 4, "not the newest one of the old line"
    assert saved(tmp_path) == saved(undisturbed)
    assert [step for step, _ in losses(tmp_path)] == [*range(8), *range(2, 5), *range(4, 8)]
    assert set(losses(tmp_path)) == set(losses(undisturbed))


def test_newer_checkpoints_that_stay_in_the_line_are_told_apart(undisturbed: Path, tmp_path: Path) -> None:
    goes_back_and_crashes(tmp_path, sets_aside=False)
    assert went_on_from(tmp_path) == NUM_STEPS
    assert [step for step, _ in losses(tmp_path)] == [*range(8)]


def test_a_run_keeps_every_some_checkpoint_for_good(tmp_path: Path) -> None:
    run_ranks(1, trained, planned(dp=1, keep_every=4, keep_checkpoints=1, num_steps=10), tmp_path)
    assert saved_steps(tmp_path) == [4, 8, 10]
