"""A blend of sources: each in its share, in an order that depends on the seed and the position alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.base.errors import ConfigError
from launcher.contract.data.blend import NUM_PARTS, Blend
from launcher.contract.plan import Plan
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.data.order import BlendOrder, SampleOrder
from launcher.runtime.train.loop import Trainer
from tests.helpers.contexts import make_config, make_context
from tests.helpers.equality import assert_equal, job, train
from tests.helpers.plans import staged_plan

SEQ = 4


# Which source stands where


def test_every_prefix_has_each_source_in_its_share() -> None:
    weights = [0.5, 0.3, 0.2]
    blend, seen = Blend(weights), [0, 0, 0]
    for position in range(3 * NUM_PARTS // 2):
        source, number = blend.at(position)
        assert number == seen[source]
        seen[source] += 1
        for count, weight in zip(seen, weights, strict=True):
            assert abs(count - weight * (position + 1)) < 2


def test_the_numbers_of_samples_are_those_that_are_taken() -> None:
    blend = Blend([7, 2, 1])
    for count in (0, 1, 17, NUM_PARTS, NUM_PARTS + 3):
        taken = Counter(blend.at(position)[0] for position in range(count))
        assert [blend.num_samples(source, count) for source in range(3)] == [taken[k] for k in range(3)]


def test_each_source_is_gone_through_once_an_epoch_in_an_order_of_its_own() -> None:
    order = BlendOrder([5, 8], Blend([1, 3]), seed=0)
    picks = [order.pick(position) for position in range(64)]
    first = [pick for pick in picks if pick[1] < 5]
    second = [pick for pick in picks if pick[1] >= 5]
    assert (len(first), len(second)) == (16, 48)
    for epoch in range(3):
        assert sorted(index for of, index in first if of == epoch) == [0, 1, 2, 3, 4]
        assert sorted(index for of, index in second if of == epoch) == [5, 6, 7, 8, 9, 10, 11, 12]
    other = BlendOrder([5, 8], Blend([1, 3]), seed=1)
    assert [other.pick(position) for position in range(64)] != picks
    assert [index for _, index in first[:5]] != [SampleOrder(5, 0).pick(k)[1] for k in range(5)]


# In a training


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    """Each window of one holds its number + 1, of the other its number + 101."""
    for name, first, count in (("a", 1, 40), ("b", 101, 20)):
        content = b"".join(bytes([first + number] * SEQ) for number in range(count))
        (tmp_path / f"{name}.txt").write_bytes(content + b"\xff")
    return str(tmp_path / "a.txt"), str(tmp_path / "b.txt")


def loader(
    sources: tuple[str, ...],
    *,
    dp: int = 1,
    rank: int = 0,
    data: dict[str, Any] | None = None,
    **sections: Any,
) -> Loader:
    settings = {"source": sources, "weights": (3.0, 1.0), "eval_fraction": 0.2, "prefetch_batches": 0}
    settings["cache_dir"] = str(Path(sources[0]).parent / "cache")
    config = make_config(
        model={"vocab_size": 256},
        data=settings | (data or {}),
        batch={"micro_size": 8 // dp, "seq_length": SEQ},
        parallel={"dp": dp},
        **sections,
    )
    return Loader(make_context(staged_plan(config), rank))


def tokens_of(opened: Loader, count: int) -> list[list[int]]:
    return [[int(i) for part in step for i in part.inputs[:, 0]] for step in islice(opened.steps(0), count)]


def test_steps_have_the_sources_by_their_weights(sources: tuple[str, str]) -> None:
    steps = tokens_of(loader(sources), 4)
    assert [sum(token > 100 for token in step) for step in steps] == [2, 2, 2, 2]
    first, second = ({t for step in steps for t in step if (t > 100) == big} for big in (False, True))
    assert len(first) == 24
    assert len(second) == 8


def test_replicas_share_the_samples_of_a_blend(sources: tuple[str, str]) -> None:
    replicas = [tokens_of(loader(sources, dp=2, rank=rank), 4) for rank in range(2)]
    joined = [sorted(a + b) for a, b in zip(*replicas, strict=True)]
    assert joined == [sorted(step) for step in tokens_of(loader(sources), 4)]


def test_evaluations_take_the_end_of_each_source(sources: tuple[str, str]) -> None:
    (batches,) = loader(sources, train={"eval_batches": 1}).evaluation()
    evaluated = sorted(int(i) for batch in batches for i in batch.inputs[:, 0])
    assert evaluated == [*range(33, 39), 117, 118]


def test_a_source_of_the_evaluation_leaves_all_to_the_training(
    sources: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "eval.txt").write_bytes(b"e" * 100)
    data = {"source": sources[0], "weights": (), "eval_source": str(tmp_path / "eval.txt")}
    opened = loader(sources, data=data, train={"eval_batches": 2})
    assert {int(i) for batches in opened.evaluation() for b in batches for i in b.inputs.flatten()} == {101}
    assert sorted(i for step in tokens_of(opened, 5) for i in step) == list(range(1, 41))


def test_too_little_of_a_source_for_its_share_of_the_evaluation_is_refused(sources: tuple[str, str]) -> None:
    expected = (
        r"data\.source\[1\]=.*b\.txt: gives 6 of the 24 samples of an evaluation, and has 3\. "
        r"Set fewer train\.eval_batches, a larger data\.eval_fraction, or data\.eval_source\."
    )
    with pytest.raises(ConfigError, match=expected):
        loader(sources, data={"weights": (3.0, 1.0), "eval_fraction": 0.2}, train={"eval_batches": 3})


def test_a_source_without_a_sample_is_refused(sources: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"xy")
    expected = r"data\.source\[1\]=.*: has no sample of batch\.seq_length = 4 tokens to train on\. Give more"
    with pytest.raises(ConfigError, match=expected):
        loader(sources)


def test_too_little_in_the_source_of_the_evaluation_is_told_as_that(
    sources: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "eval.txt").write_bytes(b"e" * 41)
    data = {"eval_source": str(tmp_path / "eval.txt")}
    expected = (
        r"train\.eval_batches=2: needs 2 \* 8 = 16 samples; data\.eval_source has 10\. Set .*=1, or more"
    )
    with pytest.raises(ConfigError, match=expected):
        loader(sources, data=data, train={"eval_batches": 2})


# Over devices


def blended(**parallel: Any) -> Plan:
    folder = "package:pydoc_data/topics.py"
    data = {"source": (folder, "package:json/**/*.py"), "weights": (0.7, 0.3)}
    return job(data=data, parallel=parallel)


def test_a_blend_over_replicas_and_stages_trains_as_on_one_device() -> None:
    alone = train(blended())
    assert_equal(train(blended(dp=2, pp=2)), alone)


def test_a_blend_by_other_weights_is_noticed() -> None:
    def other(trainer: Trainer, loader: Loader) -> None:
        loader._blend = Blend([0.6, 0.4])

    alone = train(blended())
    with pytest.raises(AssertionError):
        assert_equal(train(blended(dp=2), sabotage=other), alone)


def test_weights_change_the_training() -> None:
    plan = blended()
    data = replace(plan.config.data, weights=(0.5, 0.5))
    other = replace(plan, config=replace(plan.config, data=data))
    losses = [torch.tensor(train(each).losses) for each in (plan, other)]
    assert not torch.allclose(losses[0], losses[1])
