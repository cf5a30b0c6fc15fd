"""A run that goes on from a step of its past, and one that begins with a checkpoint of another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from launcher.base.registry import resolve
from launcher.contract.plan import Plan
from launcher.runs.resume import set_aside_newer
from launcher.runs.store import RunDirectory, saved_steps
from launcher.runtime.api import FragmentReader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train import loop
from launcher.runtime.train.loop import Trainer
from launcher.typed.read import plain
from launcher_plugins.architectures.parameter_server.runtime.shard import Shard
from tests.helpers.equality import CPU, job
from tests.helpers.objects import substitute
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.run_folders import make_folders
from tests.helpers.servers import servers_job
from tests.runtime.test_saving import saved, trained

NUM_STEPS, BACK_TO, CRASHES_IN = 8, 2, 5
"""The steps of a run that saves every second, the one it goes back to, and one that ends it."""


STANDS_STILL = {"lr": 1e-30, "weight_decay": 0.0}
"""An optimizer whose steps change no weight."""


def planned(
    *, num_steps: int = NUM_STEPS, dp: int = 2, optim: dict[str, Any] | None = None, **train: Any
) -> Plan:
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
    return job(model=model, parallel={"dp": dp}, train=train, optim=optim or {})


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


# A run that begins with a checkpoint of another


def state_of(run_dir: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of the checkpoint of one rank, by its global name."""
    file = run_dir / "checkpoints" / f"step-{step:08d}" / "shard-00000.safetensors"
    return {name.partition(":")[2]: tensor for name, tensor in load_file(file).items()}


def begun(source: Path, step: int, run_dir: Path, **settings: Any) -> None:
    """A new run that begins with a checkpoint."""
    folder = source / "checkpoints" / f"step-{step:08d}"
    plan = planned(init_from=str(folder), **settings)
    run_ranks(plan.world_size, trained, plan, run_dir)


def test_a_run_that_takes_the_optimizer_goes_on_as_its_source_did(undisturbed: Path, tmp_path: Path) -> None:
    before = saved(undisturbed)
    begun(undisturbed, 4, tmp_path, init_optimizer=True)
    assert [step for step, _ in losses(tmp_path)] == [4, 5, 6, 7]
    assert set(losses(tmp_path)) < set(losses(undisturbed))
    ours = saved(tmp_path)
    assert ours == {name: before[name] for name in before if name > "step-00000005"}
    assert saved(undisturbed) == before, "the source is only read"


def test_under_another_layout_it_goes_on_as_well(undisturbed: Path, tmp_path: Path) -> None:
    begun(undisturbed, 4, tmp_path, init_optimizer=True, dp=1)
    whole = dict(losses(undisturbed))
    found = dict(losses(tmp_path))
    assert sorted(found) == [4, 5, 6, 7]
    torch.testing.assert_close(found, {step: whole[step] for step in found}, rtol=2e-5, atol=0)


def test_weights_alone_begin_with_step_1_and_a_fresh_optimizer(undisturbed: Path, tmp_path: Path) -> None:
    begun(undisturbed, 4, tmp_path, dp=1, num_steps=2, optim=STANDS_STILL)
    assert [step for step, _ in losses(tmp_path)] == [0, 1]
    found, source = state_of(tmp_path, 2), state_of(undisturbed, 4)
    weights = [name for name in source if name.startswith("weight/")]
    assert len(weights) > 10
    assert all(torch.equal(found[name], source[name]) for name in weights)
    assert found["optimizer/step"].item() == 2
    assert source["optimizer/step"].item() == 4


def test_moments_that_are_kept_with_weights_alone_are_told_apart(undisturbed: Path, tmp_path: Path) -> None:
    """The moments after two steps of a fresh optimizer are not those of one with a history."""
    begun(undisturbed, 4, tmp_path / "alone", dp=1, num_steps=6, optim=STANDS_STILL)
    begun(undisturbed, 4, tmp_path / "all", dp=1, num_steps=6, optim=STANDS_STILL, init_optimizer=True)
    alone, everything = state_of(tmp_path / "alone", 2), state_of(tmp_path / "all", 6)
    assert everything["optimizer/step"].item() == 6
    name = next(name for name in alone if name.startswith("exp_avg_sq/layers.0."))
    assert not torch.equal(alone[name], everything[name])


def test_a_checkpoint_that_is_gone_by_the_start_is_told_as_such(undisturbed: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RankError,
        match=r"train\.init_from=\S+/step-00000003 is no longer there: its run keeps its newest checkpoints, "
        r"and those of train\.keep_every\. Begin with one that is kept\.",
    ):
        begun(undisturbed, 3, tmp_path, dp=1)


def test_a_damaged_checkpoint_is_not_begun_with(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "source")
    folder = tmp_path / "source" / "checkpoints" / "step-00000004"
    (folder / "complete.json").write_text("{")
    with pytest.raises(RankError, match=r"train\.init_from=\S+/step-00000004 is damaged: "):
        begun(tmp_path / "source", 4, tmp_path / "new", dp=1)


def trained_with_servers(rank: int, plan: Plan, run_dir: Path) -> None:
    make_folders(run_dir)
    ctx = make_context(plan.rank(rank), CPU)
    (resolve(ctx.plan.role.serve) if ctx.plan.role.serve else loop.train)(ctx, run_dir, resume=False)


def loses_the_moments_of_its_servers(rank: int) -> None:
    load = Shard.load
    substitute(Shard, "load", lambda shard, read: load(shard, weights_alone(read)))


def weights_alone(read: FragmentReader) -> FragmentReader:
    return lambda name, *box: read(name, *box) * (0 if name.startswith("exp_avg/") else 1)


@pytest.mark.parametrize("is_whole", [True, False])
def test_servers_take_the_optimizer_too(undisturbed: Path, tmp_path: Path, is_whole: bool) -> None:
    folder = undisturbed / "checkpoints" / "step-00000004"
    settings = planned(init_from=str(folder), init_optimizer=True).config
    model = {"num_layers": 2, "vocab_size": 257, "dropout": 0.1}
    plan = servers_job(model=model, options={"servers": 2}, train=plain(settings.train))
    before = (lambda rank: None) if is_whole else loses_the_moments_of_its_servers
    run_ranks(plan.world_size, trained_with_servers, plan, tmp_path, before=before)
    whole, found = dict(losses(undisturbed)), dict(losses(tmp_path))
    assert sorted(found) == [4, 5, 6, 7]
    differ = max(abs(found[step] / whole[step] - 1) for step in found)
    assert (differ < 2e-5) == is_whole
