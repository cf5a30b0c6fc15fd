"""A checkpoint goes on exactly where it was, under the same or another layout, or is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.base.errors import JobError
from launcher.contract.plan import Plan
from launcher.runtime.api import GlobalFragment, GlobalSlice
from launcher.runtime.checkpoint import store as checkpoint
from launcher.runtime.checkpoint.saving import restore
from launcher.runtime.checkpoint.shard import save_shard, sha256_of
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import CPU, job
from tests.helpers.halves import (
    HALF,
    MODEL,
    first_half,
    losses_of,
    save,
    second_half,
    started,
    uninterrupted,
)
from tests.helpers.objects import inside
from tests.helpers.ranks import run_ranks

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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


def write(root: Path, step: int, value: float) -> Path:
    where = GlobalSlice(name="w", shape=(4, 2), offset=(0, 0), is_sharded=False)
    fragment = GlobalFragment(slice=where, tensor=torch.full((4, 2), value))
    save_shard(checkpoint.unfinished_folder(root, step), 0, [fragment])
    checkpoint.complete(root, step, num_shards=1)
    return checkpoint.folder_of(root, step)


def damage(folder: Path) -> None:
    (folder / "shard-00000.safetensors").write_bytes(b"")


def test_a_box_is_read_across_pieces(tmp_path: Path) -> None:
    whole = torch.arange(10.0).view(5, 2)
    unfinished, final = checkpoint.unfinished_folder(tmp_path, 1), checkpoint.folder_of(tmp_path, 1)
    for rank, rows in enumerate((slice(0, 2), slice(2, 5))):
        where = GlobalSlice(name="w", shape=(5, 2), offset=(rows.start, 0), is_sharded=True)
        save_shard(unfinished, rank, [GlobalFragment(slice=where, tensor=whole[rows])])
    checkpoint.complete(tmp_path, 1, num_shards=2)
    read = checkpoint.Checkpoint(final).read
    assert torch.equal(read("w", (1, 1), (3, 1)), whole[1:4, 1:])
    with pytest.raises(JobError, match=r"does not hold all of w at \(3, 0\) size \(3, 2\)"):
        read("w", (3, 0), (3, 2))


def test_a_damaged_checkpoint_is_passed_over_for_the_last_good_one(tmp_path: Path) -> None:
    write(tmp_path, 100, 1.0)
    damage(write(tmp_path, 200, 2.0))
    step, skipped = checkpoint.newest(tmp_path)
    assert step == 100
    assert "step-00000200 was skipped" in skipped[0]
    assert "damaged" in skipped[0]


def test_where_none_is_whole_each_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    for step in (100, 200):
        damage(write(tmp_path, step, 1.0))
    message = (
        r"no checkpoint in .* is whole; start anew with --overwrite\nstep-00000200 was .*\nstep-00000100"
    )
    with pytest.raises(JobError, match=message):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("content", ["[]", "3", "[" * 100_000, '{"sha256": []}', '{"pieces": [3]}', "{"])
@pytest.mark.parametrize("name", ["shard-00000.json", "complete.json"])
def test_an_index_of_another_form_is_passed_over(name: str, content: str, tmp_path: Path) -> None:
    write(tmp_path, 100, 1.0)
    (write(tmp_path, 200, 2.0) / name).write_text(content)
    assert checkpoint.newest(tmp_path)[0] == 100


def swapped(index: dict[str, Any]) -> dict[str, Any]:
    """Adam's moments under the name of the weights."""
    (piece,) = index["pieces"]
    return index | {"pieces": [piece | {"name": "exp_avg/w"}]}


def shifted(index: dict[str, Any]) -> dict[str, Any]:
    (piece,) = index["pieces"]
    return index | {"pieces": [piece | {"offset": [1, 0]}]}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("shard-00000.json", swapped),
        ("shard-00000.json", shifted),
        ("complete.json", lambda marker: marker | {"step": 300}),
        ("complete.json", lambda marker: marker | {"num_shards": 0}),
        ("complete.json", lambda marker: marker | {"indices": {}}),
    ],
)
def test_an_index_that_is_not_as_it_was_written_is_passed_over(
    name: str, change: Any, tmp_path: Path
) -> None:
    write(tmp_path, 100, 1.0)
    path = write(tmp_path, 200, 2.0) / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    step, (sentence,) = checkpoint.newest(tmp_path)
    assert (step, "is missing or damaged" in sentence or "is damaged" in sentence) == (100, True)


class Hostile:
    """What a loader that unpickles would run."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> Any:
        return Path.touch, (self.touched,)


@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
def test_nothing_is_unpickled_though_its_checksum_is_right(dump: Any, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    write(tmp_path, 100, 1.0)
    hostile = write(tmp_path, 200, 2.0)
    shard, index = hostile / "shard-00000.safetensors", hostile / "shard-00000.json"
    with shard.open("wb") as file:
        dump(Hostile(touched), file)
    index.write_text(json.dumps(json.loads(index.read_text()) | {"sha256": sha256_of(shard)}))
    checkpoint.write_marker(hostile, 200)
    step, (sentence,) = checkpoint.newest(tmp_path)
    assert (step, touched.exists()) == (100, False)
    assert "is no safetensors file" in sentence
    with pytest.raises(JobError, match="is no safetensors file"):
        checkpoint.Checkpoint(hostile).read("w", (0, 0), (1, 1))
    pickle.loads(pickle.dumps(Hostile(touched)))
    assert touched.exists(), "it would have been seen"


def test_a_shard_is_verified_before_anything_is_read_from_it(tmp_path: Path) -> None:
    found = checkpoint.Checkpoint(write(tmp_path, 1, 1.0))
    damage(checkpoint.folder_of(tmp_path, 1))
    with pytest.raises(JobError, match=r"shard-00000\.safetensors is missing or damaged"):
        found.read("w", (0, 0), (1, 1))


def test_a_save_that_was_cut_is_not_a_checkpoint_and_does_not_leak_into_the_next(tmp_path: Path) -> None:
    where = GlobalSlice(name="w", shape=(1,), offset=(0,), is_sharded=False)
    fragment = GlobalFragment(slice=where, tensor=torch.zeros(1))
    save_shard(checkpoint.unfinished_folder(tmp_path, 300), 7, [fragment])
    with pytest.raises(JobError, match=r"no intact checkpoint in .*set train\.checkpoint_interval"):
        checkpoint.newest(tmp_path)
    assert [path.name for path in write(tmp_path, 300, 1.0).glob("shard-*.json")] == ["shard-00000.json"]


def test_a_shard_that_did_not_arrive_ends_the_save(tmp_path: Path) -> None:
    save_shard(checkpoint.unfinished_folder(tmp_path, 1), 0, [])
    with pytest.raises(JobError, match=r"has 1 of 2 shards; is the run directory shared by all nodes\?"):
        checkpoint.complete(tmp_path, 1, num_shards=2)
    assert not checkpoint.folder_of(tmp_path, 1).exists()


def test_the_same_step_saved_again_replaces_what_was_there(tmp_path: Path) -> None:
    damage(write(tmp_path, 1, 1.0))
    found = checkpoint.Checkpoint(write(tmp_path, 1, 2.0))
    assert torch.equal(found.read("w", (0, 0), (1, 1)), torch.full((1, 1), 2.0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_missing_shard_is_counted(tmp_path: Path) -> None:
    final = write(tmp_path, 1, 1.0)
    marker = {"version": 1, "step": 1, "num_shards": 2}  # as earlier versions wrote it
    (final / "complete.json").write_text(json.dumps(marker))
    with pytest.raises(JobError, match="has 1 of 2 shards"):
        checkpoint.Checkpoint(final)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    final = write(tmp_path, 1, 1.0)
    with pytest.raises(JobError, match=r"does not hold all of weight/x at \(0,\) size \(3,\)"):
        checkpoint.Checkpoint(final).read("weight/x", (0,), (3,))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, float(step))
    checkpoint.prune(tmp_path, 3, keep=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_beside_the_newest_those_after_a_multiple_of_some_steps_are_kept_for_good(tmp_path: Path) -> None:
    for step in range(2, 13, 2):
        write(tmp_path, step, float(step))
        checkpoint.prune(tmp_path, step, keep=1, every=4)
    assert [int(folder.name[5:]) for folder in sorted(tmp_path.iterdir())] == [4, 8, 12]
    write(tmp_path, 14, 14.0)
    checkpoint.prune(tmp_path, 14, keep=2, every=4)
    assert [int(folder.name[5:]) for folder in sorted(tmp_path.iterdir())] == [4, 8, 12, 14]


def test_a_damaged_checkpoint_from_before_a_resume_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    write(tmp_path, 40, 1.0)
    damage(write(tmp_path, 80, 1.0))
    write(tmp_path, 60, 1.0)
    checkpoint.prune(tmp_path, 60, keep=1)
    assert checkpoint.newest(tmp_path)[0] == 60


def fp16_after_an_overflow(rank: int, plan: Plan, root: Path) -> tuple[float, int]:
    """The loss scale and its counter, restored from a checkpoint made before any update."""
    first, steps = started(rank, plan)
    inside(first.update)._scale.value = 2.0**40
    assert first.step(0, next(steps)).outcome.is_skipped
    inside(first.update)._scale.num_good_steps = 5
    save(first, root, 1)
    second = Trainer(make_context(plan.rank(rank), CPU))
    restore(second.ctx, second.update, root)
    return second.update.loss_scale, inside(second.update)._scale.num_good_steps


def test_a_loss_scale_is_restored_even_where_every_step_was_skipped(tmp_path: Path) -> None:
    plan = job(
        precision={"name": "fp16", "compute": "fp16"},
        device={"peak_flops": {"fp32": 1e9, "fp16": 1e9}},
        parallel={"pp": 2},
    )
    assert run_ranks(2, fp16_after_an_overflow, plan, tmp_path) == [(2.0**39, 5)] * 2
