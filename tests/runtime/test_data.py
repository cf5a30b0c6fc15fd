"""Every layout trains on the same samples in the same order."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.base.errors import ConfigError
from launcher.runtime.data.microbatches import Loader, Microbatch
from launcher.runtime.data.samples import TokenWindows
from launcher.runtime.data.tokens import open_tokens
from launcher.runtime.process import environment
from tests.helpers.contexts import make_config, make_context
from tests.helpers.plans import staged_plan

SEQ = 6
NUM_WINDOWS = 40


class Numbers:
    """Sample n is the number n."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor(index)


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Training windows 0 .. 39 all begin with their own number and 1; then a fifth as much to evaluate."""
    content = b"".join(bytes([n + 1] + [200] * (SEQ - 1)) for n in range(NUM_WINDOWS))
    path = tmp_path / "text"
    path.write_bytes(content + b"\xc8" + b"e" * 60)
    return str(path)


def loader(source: str, *, dp: int = 1, rank: int = 0, **sections: Any) -> Loader:
    num_training = NUM_WINDOWS * SEQ + 1
    data = {
        "source": source,
        "cache_dir": str(Path(source).parent / "cache"),
        "eval_fraction": 60.5 / (num_training + 60),
    }
    config = make_config(
        model={"vocab_size": 256} | sections.pop("model", {}),
        data=data | sections.pop("data", {}),
        batch={"micro_size": 8 // dp, "seq_length": SEQ} | sections.pop("batch", {}),
        parallel={"dp": dp},
        **sections,
    )
    return Loader(make_context(staged_plan(config), rank))


def by_slot(batches: list[list[Microbatch]]) -> list[int]:
    """The window in every slot of one step, from all replicas' microbatches."""
    found = {
        int(slot): int(inputs[0]) - 1
        for microbatches in batches
        for batch in microbatches
        for slot, inputs in zip(batch.samples, batch.inputs, strict=True)
    }
    assert sorted(found) == list(range(8))
    return [found[slot] for slot in range(8)]


def steps(source: str, count: int, **layout: Any) -> list[list[int]]:
    dp = layout.get("dp", 1)
    replicas = [loader(source, rank=rank, **layout).steps(0) for rank in range(dp)]
    return [by_slot([next(replica) for replica in replicas]) for _ in range(count)]


@pytest.mark.parametrize(
    ("dp", "micro", "microbatches"), [(1, 2, 4), (1, 1, 8), (2, 4, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1)]
)
def test_every_layout_sees_the_same_samples(source: str, dp: int, micro: int, microbatches: int) -> None:
    batch = {"micro_size": micro, "num_microbatches": microbatches}
    assert steps(source, 12, dp=dp, batch=batch) == steps(source, 12)


def test_a_shifted_loader_is_noticed(source: str) -> None:
    shifted = [by_slot([batch]) for batch in islice(loader(source).steps(1), 12)]
    assert shifted != steps(source, 12)


def test_every_epoch_takes_each_sample_once_in_another_order(source: str) -> None:
    taken = [token for step in steps(source, 10) for token in step]
    first, second = taken[:NUM_WINDOWS], taken[NUM_WINDOWS:]
    assert sorted(first) == sorted(second) == list(range(NUM_WINDOWS))
    assert first != second
    assert first != sorted(first)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_steps_may_begin_anywhere(source: str, prefetch: int) -> None:
    data = {"prefetch_batches": prefetch}
    opened = loader(source, data=data)
    later = [by_slot([batch]) for batch in islice(opened.steps(7), 2)]
    opened.close()
    assert later == steps(source, 9)[7:]
    assert next(loader(source).steps(7))[0].step == 7


def test_targets_are_the_next_tokens(source: str, tmp_path: Path) -> None:
    config = make_config(data={"source": source, "cache_dir": str(tmp_path / "cache")})
    opened = open_tokens(config.data, "data.source", config.run.root)
    windows, tokens = TokenWindows(opened, SEQ), opened.read(0, len(opened))
    for index in range(len(windows)):
        inputs, targets = windows[index]
        start = index * SEQ
        assert inputs.tolist() == tokens[start : start + SEQ].tolist()
        assert targets.tolist() == tokens[start + 1 : start + SEQ + 1].tolist()
        assert inputs.dtype == targets.dtype == torch.int64


def test_evaluation_takes_the_first_windows_of_the_end_and_never_trains_on_them(source: str) -> None:
    opened = loader(source, train={"eval_batches": 1})
    (batches,) = opened.evaluation()
    tokens = torch.cat([batch.inputs for batch in batches])
    assert tokens.shape == (8, SEQ)
    assert (tokens == ord("e")).all()
    assert opened.evaluation()[0][0].inputs.equal(batches[0].inputs)
    assert all(token < NUM_WINDOWS for step in steps(source, 5) for token in step)


def test_evaluation_is_shared_by_the_replicas(source: str) -> None:
    parts = [loader(source, dp=2, rank=rank, train={"eval_batches": 1}).evaluation()[0] for rank in range(2)]
    assert sorted(int(slot) for part in parts for batch in part for slot in batch.samples) == list(range(8))


def test_too_little_text_for_a_step_is_refused(source: str) -> None:
    expected = (
        r"batch\.global_size=64: needs as many samples, and the training part of text has 40: give more "
        r"data, or a smaller batch\.seq_length\.$"
    )
    with pytest.raises(ConfigError, match=expected):
        loader(source, batch={"micro_size": 64})


def test_too_little_text_for_the_evaluation_is_refused(source: str) -> None:
    expected = (
        r"train\.eval_batches=2: needs 2 \* 8 = 16 samples; the evaluation part of text "
        r"\(data\.eval_fraction=0\.2\d*\) has 9\. Set train\.eval_batches=1"
    )
    with pytest.raises(ConfigError, match=expected):
        loader(source, train={"eval_batches": 2})


def test_evaluation_without_a_part_of_the_data_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"\(data\.eval_fraction=0\) has 0\. Set train\.eval_batches=0"):
        loader(source, train={"eval_batches": 1}, data={"eval_fraction": 0.0})


def test_a_users_dataset_is_shuffled_and_its_end_is_evaluated(source: str) -> None:
    target = f"{Numbers.__module__}:Numbers"
    data = {"source": None, "target": target, "eval_fraction": 0.4}
    batch = {"micro_size": 4, "num_microbatches": 1}
    custom = {"family": "custom"}
    opened = loader(source, model=custom, data=data, batch=batch, train={"eval_batches": 2})
    seen = [int(target) for batches in islice(opened.steps(0), 3) for target in batches[0].targets]
    assert sorted(seen) == list(range(12))
    assert seen != sorted(seen)
    evaluated = [int(target) for batches in opened.evaluation() for target in batches[0].targets]
    assert evaluated == list(range(12, 20))


def test_an_error_of_the_dataset_reaches_the_loop(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = loader(source, data={"prefetch_batches": 2})

    def broken(self: TokenWindows, index: int) -> tuple[Tensor, Tensor]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(TokenWindows, "__getitem__", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        next(opened.steps(0))


def test_the_cache_follows_the_xdg_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.user_cache() == tmp_path / "trireme"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.user_cache() == tmp_path / ".cache" / "trireme"
