"""The order of the samples: a permutation for every epoch, in constant memory."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.contract.plan import Plan
from launcher.runtime.checkpoint.store import folder_of
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.data.order import Permutation, SampleOrder
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import CPU, job
from tests.helpers.halves import HALF, MODEL, STEPS, losses_of, save, second_half, uninterrupted
from tests.helpers.ranks import run_ranks

SIZES = (*range(1, 130), 1000, 4097)


def whole(size: int, key: str = "") -> list[int]:
    permutation = Permutation(size, key)
    return [permutation[index] for index in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_every_number_is_taken_once(size: int) -> None:
    assert sorted(whole(size)) == list(range(size))


def test_the_key_and_nothing_else_decides() -> None:
    assert whole(1000, "0/order/0") == whole(1000, "0/order/0") != whole(1000, "0/order/1")


def test_an_index_outside_is_an_error() -> None:
    with pytest.raises(IndexError, match=r"^5 is not in range\(5\)$"):
        Permutation(5, "")[5]


def chi_squared(counts: Sequence[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


def test_any_sample_may_stand_anywhere() -> None:
    """Tenths of the samples against tenths of the positions: 81 degrees of freedom, deviation 12.7."""
    pairs = Counter(
        (index // 10, sample // 10) for key in range(500) for index, sample in enumerate(whole(100, str(key)))
    )
    assert len(pairs) == 100
    assert chi_squared(list(pairs.values())) < 81 + 4 * 12.7


def test_neighbours_in_the_order_are_no_neighbours_in_the_data() -> None:
    """Distance of successive samples, by tenths: 9 degrees of freedom, deviation 4.2."""
    size = 10**6
    order = Permutation(size, "")
    samples = [order[index] for index in range(20_000)]
    distances = Counter((b - a) % size // (size // 10) for a, b in pairwise(samples))
    assert len(distances) == 10
    assert chi_squared(list(distances.values())) < 9 + 4 * 4.2


def test_ten_billion_samples_need_no_memory() -> None:
    tracemalloc.start()
    order = SampleOrder(10**10, seed=0)
    picks = {order.pick(epoch * 10**10 + place) for epoch in (0, 3) for place in (0, 1, 10**10 - 1)}
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(picks) == 6
    assert {epoch for epoch, _ in picks} == {0, 3}
    assert peak_bytes < 100_000


def test_a_step_may_span_two_epochs() -> None:
    order = SampleOrder(5, seed=0)
    taken = [order.pick(position)[1] for position in range(15)]
    assert [sorted(taken[first : first + 5]) for first in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3


def test_the_seed_changes_the_order() -> None:
    orders = [SampleOrder(50, seed) for seed in (0, 0, 1)]
    one, again, other = ([order.pick(place) for place in range(50)] for order in orders)
    assert one == again != other


def test_the_order_of_older_checkpoints_stays() -> None:
    """Written down from the version that shuffled a table."""
    order = SampleOrder(10, seed=0, version=1)
    assert [order.pick(place)[1] for place in range(12)] == [5, 3, 6, 1, 0, 8, 9, 7, 2, 4, 6, 7]


def of_the_first_version(rank: int, plan: Plan, root: Path, num_steps: int) -> list[float | None]:
    """Steps of a training that began when the order was a shuffled table, and a checkpoint."""
    ctx = make_context(plan.rank(rank), CPU)
    ctx.sample_order = 1
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    losses = [trainer.step(step, next(steps)).loss for step in range(num_steps)]
    save(trainer, root, num_steps)
    return losses


@pytest.mark.parametrize("is_named", [True, False])
def test_a_training_goes_on_in_the_order_that_it_began_with(tmp_path: Path, is_named: bool) -> None:
    plan = job(model=MODEL)
    whole = losses_of(run_ranks(1, of_the_first_version, plan, tmp_path / "whole", STEPS))
    losses = losses_of(run_ranks(1, of_the_first_version, plan, tmp_path, HALF))
    marker = folder_of(tmp_path, HALF) / "complete.json"
    assert json.loads(marker.read_text())["sample_order"] == 1
    if not is_named:  # as it was written before there was another order
        marker.write_text(json.dumps({"version": 1, "step": HALF, "num_shards": 1}))
    assert losses + losses_of(run_ranks(1, second_half, plan, tmp_path)) == whole
    assert losses_of(run_ranks(1, uninterrupted, plan)) != whole
