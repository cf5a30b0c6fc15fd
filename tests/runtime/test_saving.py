"""Checkpoints are written while the training goes on, and are what they would be if it had waited."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.base.errors import JobError
from launcher.base.files import bring_to_disk
from launcher.contract.job import SAVE_TIMES, needed_lead_s
from launcher.contract.plan import Plan
from launcher.runtime.checkpoint import saving, shard
from launcher.runtime.checkpoint import store as checkpoint
from launcher.runtime.checkpoint.saving import HostCopy
from launcher.runtime.process.rank import make_context
from launcher.runtime.train import loop
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import CPU, job
from tests.helpers.objects import inside, substitute
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.run_folders import make_folders

NUM_STEPS, INTERVAL = 6, 2
Arrange = Callable[[int], None]
"""Prepares one rank before it trains."""


def planned(*, keep: int = 9, is_async: bool = True, **layout: Any) -> Plan:
    train = {
        "num_steps": NUM_STEPS,
        "eval_batches": 0,
        "eval_interval": 0,
        "checkpoint_interval": INTERVAL,
        "keep_checkpoints": keep,
        "async_checkpoint": is_async,
    }
    return job(model={"num_layers": 2}, parallel=layout, train=train)


def trained(
    rank: int, plan: Plan, run_dir: Path, arrange: Arrange | None = None, resume: bool = False
) -> None:
    """The whole run, as a rank makes it."""
    make_folders(run_dir)
    if arrange is not None:
        arrange(rank)
    loop.train(make_context(plan.rank(rank), CPU), run_dir, resume=resume)
    torch.distributed.barrier()


def saved(run_dir: Path) -> dict[str, bytes]:
    """Every file of every checkpoint."""
    root = run_dir / "checkpoints"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def write_late(rank: int, *, holds_training: bool = False) -> None:
    """Holds every write back until the training is a step on, or has ended. ``holds_training``: it then
    stands still until that is written."""
    write, step, changed = inside(saving).save_shard, Trainer.step, threading.Condition()
    num_steps, num_written = 0, 0

    def counting(trainer: Trainer, *args: Any) -> Any:
        nonlocal num_steps
        done = step(trainer, *args)
        with changed:
            num_steps += 1
            changed.notify_all()
            if holds_training:
                changed.wait_for(lambda: num_written >= (num_steps - 1) // INTERVAL)
        return done

    def late(folder: Path, *args: Any) -> int:
        nonlocal num_written
        due = int(folder.stem.removeprefix("step-")) + 1
        with changed:
            changed.wait_for(lambda: num_steps >= min(due, NUM_STEPS))
        size = write(folder, *args)
        with changed:
            num_written += 1
            changed.notify_all()
        return size

    substitute(Trainer, "step", counting)
    substitute(saving, "save_shard", late)


def take_no_copy(rank: int) -> None:
    substitute(HostCopy, "take", lambda copy, fragments: list(fragments))
    write_late(rank, holds_training=True)  # what changes under the write, the reading back would find


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}], ids=str)
def test_what_is_written_while_the_training_goes_on_is_what_a_waiting_run_writes(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(2, trained, planned(**layout), tmp_path / "going on", write_late)
    run_ranks(2, trained, planned(**layout, is_async=False), tmp_path / "waiting")
    assert saved(tmp_path / "going on") == saved(tmp_path / "waiting")


def test_a_state_that_is_not_copied_is_told_apart(tmp_path: Path) -> None:
    run_ranks(1, trained, planned(), tmp_path / "going on", take_no_copy)
    run_ranks(1, trained, planned(is_async=False), tmp_path / "waiting")
    going_on, waiting = saved(tmp_path / "going on"), saved(tmp_path / "waiting")
    name = f"step-{INTERVAL:08d}/shard-00000.safetensors"
    assert going_on[name] != waiting[name]


def spans_of_saves(rank: int, plan: Plan, run_dir: Path) -> list[str]:
    """What began and what ended, in order."""
    events: list[str] = []
    write, take = inside(saving).save_shard, HostCopy.take

    def slow(*args: Any) -> int:
        size = write(*args)
        events.append("written")
        return size

    def noted(copy: HostCopy, fragments: Any) -> Any:
        events.append("copied")
        return take(copy, fragments)

    substitute(saving, "save_shard", slow)
    substitute(HostCopy, "take", noted)
    write_late(rank)
    trained(rank, plan, run_dir)
    return events


def test_a_save_waits_for_the_one_before_and_the_end_for_the_last(tmp_path: Path) -> None:
    (events,) = run_ranks(1, spans_of_saves, planned(), tmp_path)
    assert events == ["copied", "written"] * (NUM_STEPS // INTERVAL)


def at_step(step: int, action: Callable[..., int]) -> None:
    """Does something else in place of writing the shard of a step."""
    write = inside(saving).save_shard

    def instead(folder: Path, *args: Any) -> int:
        if folder.stem == f"step-{step:08d}":
            return action(folder, *args)
        return write(folder, *args)

    substitute(saving, "save_shard", instead)


def fill_the_disk(*args: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_fails_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"checkpoint after step 4 was not written: .* No space left on dev"):
        run_ranks(1, trained, planned(keep=1), tmp_path, lambda rank: at_step(4, fill_the_disk))
    assert checkpoint.newest(tmp_path / "checkpoints") == (2, [])


def test_a_place_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(RankError, match=r"no checkpoint can be written in .*checkpoints: File exists"):
        run_ranks(1, trained, planned(), tmp_path)
    assert list(tmp_path.glob("metrics/*")) == []


def close_in_the_first_step(root: Path) -> None:
    step = Trainer.step

    def closing(trainer: Trainer, number: int, *args: Any) -> Any:
        if number == 0:
            root.rmdir()
            root.touch()
        return step(trainer, number, *args)

    substitute(Trainer, "step", closing)


def test_a_place_that_is_lost_later_is_told_with_its_cause(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    message = "JobError: the checkpoint after step 2 was not written: .*Not a directory"
    with pytest.raises(RankError, match=message):
        run_ranks(1, trained, planned(), tmp_path, lambda rank: close_in_the_first_step(root))


def fail_at_the_end_on_rank_1(rank: int) -> None:
    if rank == 1:
        at_step(NUM_STEPS, fill_the_disk)


def test_a_write_that_fails_at_the_end_is_not_waited_for(tmp_path: Path) -> None:
    """Rank 0, which is told in the folder, raises itself: it waits for the shard, not in a message."""
    with pytest.raises(RankError, match=r"shard-00001 was not written: .*No space left on device"):
        run_ranks(2, trained, planned(pp=2), tmp_path, fail_at_the_end_on_rank_1)


def die_in_mid_write(folder: Path, rank: int, *args: Any) -> int:
    (folder / f"shard-{rank:05d}.safetensors").write_bytes(b"half of it")
    os._exit(1)


def test_a_crash_in_mid_write_leaves_the_earlier_checkpoint_and_no_litter(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 died without an answer"):
        run_ranks(1, trained, planned(keep=1), tmp_path, lambda rank: at_step(4, die_in_mid_write))
    root = tmp_path / "checkpoints"
    assert checkpoint.newest(root) == (2, [])
    run_ranks(1, trained, planned(keep=2), tmp_path, None, True)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000004", "step-00000006"]


def lose_a_byte(rank: int) -> None:
    """The disk gives another byte back than it was given, in step 4."""

    def losing(path: Path) -> None:
        bring_to_disk(path)
        if path.suffix == ".safetensors" and "step-00000004" in str(path):
            damaged = bytearray(path.read_bytes())
            damaged[-1] ^= 1
            path.write_bytes(damaged)

    substitute(shard, "bring_to_disk", losing)


def lose_a_byte_and_do_not_look(rank: int) -> None:
    lose_a_byte(rank)
    substitute(shard, "_check_written", lambda *args: None)


def test_an_older_checkpoint_outlives_a_newer_one_that_is_read_back_damaged(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"shard-00000\.safetensors is damaged: \d+:\S+ is read back from"):
        run_ranks(1, trained, planned(keep=1), tmp_path, lose_a_byte)
    assert checkpoint.newest(tmp_path / "checkpoints") == (2, [])


def test_without_reading_back_the_last_good_checkpoint_is_lost(tmp_path: Path) -> None:
    """What the test above sees; the index then holds the checksum of what is damaged."""
    plan = planned(keep=1)
    with pytest.raises(RankError, match="died"):
        run_ranks(1, trained, plan, tmp_path, lose_a_byte_and_die_at_6)
    good = saved(tmp_path)
    assert {Path(name).parent.name for name in good} == {"step-00000004", "step-00000006.unfinished"}


def lose_a_byte_and_die_at_6(rank: int) -> None:
    lose_a_byte_and_do_not_look(rank)
    at_step(6, die_in_mid_write)


def test_a_shard_that_a_rank_could_not_write_is_not_waited_for(tmp_path: Path) -> None:
    folder = checkpoint.unfinished_folder(tmp_path, 1)
    shard.write_failure(folder, 3, OSError("Input/output error"))
    with pytest.raises(JobError, match="shard-00003 was not written: Input/output error"):
        checkpoint.complete(tmp_path, 1, num_shards=4, timeout_s=60)


def save_slowly(rank: int) -> None:
    write = inside(saving).save_shard

    def slow(*args: Any) -> int:
        time.sleep(0.5)
        return write(*args)

    substitute(saving, "save_shard", slow)


@pytest.mark.parametrize("is_async", [False, True])
def test_how_long_the_ranks_need_to_save_is_written_as_they_find_out(tmp_path: Path, is_async: bool) -> None:
    """The newest line has the longest: the save for the end, and the save or the step that it waits for."""
    run_ranks(1, trained, planned(is_async=is_async), tmp_path, save_slowly)
    lines = (tmp_path / SAVE_TIMES).read_text().splitlines()
    assert all(re.fullmatch(r"\d+ step \d+\.\d{3} s, save \d+\.\d{3} s", line) for line in lines)
    assert float(lines[-1].split()[-2]) >= 0.5
    assert needed_lead_s(tmp_path) == int(lines[-1].split()[0]) >= 30 + 1.5 * (2 if is_async else 1) * 0.5
