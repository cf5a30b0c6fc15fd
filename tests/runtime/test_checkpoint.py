"""A checkpoint goes on exactly where it was, under the same or another layout, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import CPU, job
from ranks import run_ranks

from launcher.errors import JobError
from launcher.plan.model import Plan
from launcher.runtime import checkpoint
from launcher.runtime.api import GlobalFragment, GlobalSlice
from launcher.runtime.data import Loader
from launcher.runtime.loop import Trainer, restore, save
from launcher.runtime.rank import make_context

HALF, STEPS = 2, 4


def first_half(rank: int, plan: Plan, root: Path) -> list[float | None]:
    trainer, steps = started(rank, plan, first_step=0)
    losses = [trainer.step(step, next(steps)).loss for step in range(HALF)]
    save(trainer, root, HALF)
    return losses


def second_half(rank: int, plan: Plan, root: Path, restart_from_zero: bool = False) -> list[float | None]:
    ctx = make_context(plan.rank(rank), CPU)
    trainer = Trainer(ctx)
    first_step = restore(trainer, root)
    steps = Loader(ctx).steps(0 if restart_from_zero else first_step)
    return [trainer.step(step, next(steps)).loss for step in range(first_step, STEPS)]


def uninterrupted(rank: int, plan: Plan) -> list[float | None]:
    trainer, steps = started(rank, plan, first_step=0)
    return [trainer.step(step, next(steps)).loss for step in range(STEPS)]


def started(rank: int, plan: Plan, first_step: int) -> tuple[Trainer, Any]:
    ctx = make_context(plan.rank(rank), CPU)
    return Trainer(ctx), Loader(ctx).steps(first_step)


def losses_of(results: list[list[float | None]]) -> list[float]:
    return [loss for loss in next(r for r in reversed(results) if r[0] is not None) if loss is not None]


MODEL = {"vocab_size": 257, "dropout": 0.1}
LAYOUTS = {
    "the same": ({"dp": 2, "pp": 2}, {"dp": 2, "pp": 2}),
    "one device": ({"tp": 2, "pp": 2}, {}),
    "from one device to interleaved": ({}, {"pp": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
    "another tensor split": ({"tp": 2}, {"tp": 4}),
}


@pytest.mark.parametrize("change", LAYOUTS)
def test_training_goes_on_under_a_layout_that_is(change: str, tmp_path: Path) -> None:
    before, after = (job(model=MODEL, parallel=layout) for layout in LAYOUTS[change])
    expected = losses_of(run_ranks(1, uninterrupted, job(model=MODEL)))
    losses = losses_of(run_ranks(before.world_size, first_half, before, tmp_path))
    losses += losses_of(run_ranks(after.world_size, second_half, after, tmp_path))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-5, atol=0)


def test_a_restart_from_the_first_batch_is_told_apart(tmp_path: Path) -> None:
    plan = job(model=MODEL)
    expected = losses_of(run_ranks(1, uninterrupted, plan))[HALF:]
    run_ranks(1, first_half, plan, tmp_path)
    losses = losses_of(run_ranks(1, second_half, plan, tmp_path, True))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-5, atol=0)


def write(root: Path, step: int, value: float, name: str = "w") -> Path:
    where = GlobalSlice(name=name, shape=(4, 2), offset=(0, 0), is_sharded=False)
    final = checkpoint.folder_of(root, step)
    unfinished = final.with_name(final.name + ".unfinished")
    fragment = GlobalFragment(slice=where, tensor=torch.full((4, 2), value))
    checkpoint.save_shard(unfinished, 0, [fragment])
    checkpoint.complete(unfinished, final, step)
    return final


def test_a_box_is_read_across_pieces(tmp_path: Path) -> None:
    whole = torch.arange(10.0).view(5, 2)
    unfinished, final = tmp_path / "unfinished", checkpoint.folder_of(tmp_path, 1)
    for rank, rows in enumerate((slice(0, 2), slice(2, 5))):
        where = GlobalSlice(name="w", shape=(5, 2), offset=(rows.start, 0), is_sharded=True)
        checkpoint.save_shard(unfinished, rank, [GlobalFragment(slice=where, tensor=whole[rows])])
    checkpoint.complete(unfinished, final, 1)
    read = checkpoint.Checkpoint(final).read
    assert torch.equal(read("w", (1, 1), (3, 1)), whole[1:4, 1:])
    with pytest.raises(JobError, match=r"does not hold all of w at \(3, 0\) size \(3, 2\)"):
        read("w", (3, 0), (3, 2))


def test_a_damaged_checkpoint_is_passed_over_for_the_last_good_one(tmp_path: Path) -> None:
    write(tmp_path, 100, 1.0)
    shard = write(tmp_path, 200, 2.0) / "shard-00000.safetensors"
    shard.write_bytes(b"")
    found, skipped = checkpoint.newest(tmp_path)
    assert found.step == 100
    assert "step-00000200 was skipped" in skipped[0]
    assert "damaged" in skipped[0]


def test_a_save_that_was_cut_is_not_a_checkpoint(tmp_path: Path) -> None:
    where = GlobalSlice(name="w", shape=(1,), offset=(0,), is_sharded=False)
    fragment = GlobalFragment(slice=where, tensor=torch.zeros(1))
    checkpoint.save_shard(tmp_path / "step-00000300.unfinished", 0, [fragment])
    with pytest.raises(JobError, match=r"no checkpoint to resume from .*set train\.checkpoint_interval"):
        checkpoint.newest(tmp_path)


def test_a_missing_shard_is_counted(tmp_path: Path) -> None:
    final = write(tmp_path, 1, 1.0)
    marker = final / "complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"num_shards": 2}))
    with pytest.raises(JobError, match="has 1 of 2 shards"):
        checkpoint.Checkpoint(final)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    final = write(tmp_path, 1, 1.0)
    with pytest.raises(JobError, match=r"does not hold all of weight/x at \(0,\) size \(3,\)"):
        checkpoint.Checkpoint(final).read("weight/x", (0,), (3,))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, float(step))
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
