"""Initial weights and dropout depend on the global position alone."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.runtime.api import GlobalSlice
from launcher.runtime.model import randomness
from launcher.runtime.model.randomness import dropout, init_slice, token_seeds

SHAPE = (150, 12)
"""Two whole row blocks and a part of a third."""
KEY = {"seed": 1, "step": 2, "site": 3}


def filled(
    offset: tuple[int, ...],
    local: tuple[int, ...],
    *,
    name: str = "w",
    seed: int = 0,
    shape: tuple[int, ...] = SHAPE,
    std: float = 1.0,
) -> Tensor:
    param = torch.full(local, torch.nan)
    where = GlobalSlice(name=name, shape=shape, offset=offset, is_sharded=True)
    init_slice(param, where, seed=seed, std=std)
    return param


@pytest.mark.parametrize("offset", [(0, 0), (75, 0), (0, 6), (63, 3), (64, 0), (140, 11)])
@pytest.mark.parametrize("local", [(10, 1), (75, 6), (65, 9)])
def test_a_slice_holds_the_values_of_the_whole(offset: tuple[int, int], local: tuple[int, int]) -> None:
    if offset[1] + local[1] > SHAPE[1]:
        local = (local[0], SHAPE[1] - offset[1])
    whole = torch.zeros(400, SHAPE[1])
    whole[: SHAPE[0]] = filled((0, 0), SHAPE)
    expected = whole[offset[0] : offset[0] + local[0], offset[1] : offset[1] + local[1]]
    assert torch.equal(filled(offset, local), expected)


def test_rows_beyond_the_tensor_are_zero() -> None:
    param = filled((140, 0), (20, 12))
    assert param[:10].all()
    assert not param[10:].any()


def test_a_longer_tensor_begins_with_the_same_rows() -> None:
    assert torch.equal(filled((0, 0), (160, 12), shape=(160, 12))[:150], filled((0, 0), SHAPE))


def test_names_seeds_and_blocks_differ() -> None:
    whole = filled((0, 0), SHAPE)
    assert not torch.equal(whole, filled((0, 0), SHAPE, name="v"))
    assert not torch.equal(whole, filled((0, 0), SHAPE, seed=1))
    assert not torch.equal(whole[:64], whole[64:128])


def test_values_are_normal_with_the_given_deviation() -> None:
    values = filled((0, 0), (4096, 64), shape=(4096, 64), std=0.02) / 0.02
    assert values.mean().abs() < 0.01
    assert values.std() == pytest.approx(1, abs=0.01)
    assert (values.abs() < 1).float().mean() == pytest.approx(0.6827, abs=0.005)


def test_only_the_blocks_of_the_slice_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = randomness._block

    def noting(where: GlobalSlice, block: int, seed: int) -> Any:
        drawn.append(block)
        return draw(where, block, seed)

    monkeypatch.setattr(randomness, "_block", noting)
    filled((640, 0), (100, 8), shape=(100_000, 8))
    assert drawn == [10, 11]


def test_bf16_values_are_the_rounded_fp32_ones() -> None:
    param = torch.empty(SHAPE, dtype=torch.bfloat16)
    init_slice(param, GlobalSlice(name="w", shape=SHAPE, offset=(0, 0), is_sharded=False), seed=0, std=1.0)
    assert torch.equal(param, filled((0, 0), SHAPE).bfloat16())


def masks(
    key: dict[str, int] = KEY, p: float = 0.25, samples: int = 16, length: int = 32, size: int = 64
) -> Tensor:
    return dropout(torch.ones(samples, length, size), p, rows(key, samples, length))


def rows(key: dict[str, int], samples: int, length: int) -> Tensor:
    return token_seeds(torch.arange(samples), slice(0, length), **key)


def test_dropout_of_a_slice_of_samples_and_positions_is_that_slice() -> None:
    x = torch.randn(8, 10, 6)
    samples = torch.arange(100, 108)
    whole = dropout(x, 0.5, token_seeds(samples, slice(0, 10), **KEY))
    part = dropout(x[2:5, 4:9], 0.5, token_seeds(samples[2:5], slice(4, 9), **KEY))
    assert torch.equal(part, whole[2:5, 4:9])


def test_dropout_keeps_the_stated_share_everywhere() -> None:
    kept = (masks() > 0).float()
    assert kept.mean() == pytest.approx(0.75, abs=0.01)
    for dims, tolerance in (((1, 2), 0.05), ((0, 2), 0.07), ((0, 1), 0.1)):
        assert (kept.mean(dims) - 0.75).abs().max() < tolerance


def test_dropout_scales_what_it_keeps() -> None:
    assert torch.equal(masks().unique(), torch.tensor([0, 1 / 0.75]))


@pytest.mark.parametrize("shift", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_neighbouring_elements_are_dropped_independently(shift: tuple[int, int, int]) -> None:
    kept = (masks(p=0.5) > 0).float() - 0.5
    correlation = 4 * (kept * kept.roll(shift, (0, 1, 2))).mean()
    assert correlation.abs() < 4 * kept.numel() ** -0.5


@pytest.mark.parametrize("other", [{"seed": 2}, {"step": 3}, {"site": 4}])
def test_seeds_steps_and_sites_drop_independently(other: dict[str, int]) -> None:
    one = masks(p=0.5) - 1
    two = masks(KEY | other, p=0.5) - 1
    assert (one * two).mean().abs() < 4 * one.numel() ** -0.5


def test_dropout_passes_the_gradient_of_what_it_keeps() -> None:
    x = torch.ones(2, 3, 4, requires_grad=True)
    out = dropout(x, 0.5, rows(KEY, 2, 3))
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


def mixed(value: int, bits: int, rounds: list[tuple[int, int]], last_shift: int) -> int:
    for shift, factor in rounds:
        value = (value ^ value >> shift) * factor % 2**bits
    return value ^ value >> last_shift


def is_kept(key: dict[str, int], p: float, sample: int, position: int, feature: int) -> bool:
    """The definition in whole numbers, one element at a time."""
    digest = hashlib.blake2b(f"{key['seed']}/{key['step']}/{key['site']}".encode(), digest_size=8).digest()
    row = (sample << 32 | position) ^ int.from_bytes(digest, "little")
    row = mixed(row, 64, [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)], 31)
    low, high = (row ^ 1 << 31) % 2**32, (row >> 32) ^ 1 << 31
    rounds = [(16, 0x7FEB352D), (15, 0x846CA68B)]
    element = mixed(((mixed(feature + 1, 32, rounds, 16) ^ low) + high) % 2**32, 32, rounds, 16)
    return element % 2**31 >= round(p * 2**31)


def test_dropout_is_the_hash_that_it_is_said_to_be() -> None:
    places = token_seeds(torch.tensor([0, 9, 70_000]), slice(6, 10), **KEY)
    out = dropout(torch.ones(3, 4, 5), 0.4, places)
    expected = [
        [[is_kept(KEY, 0.4, sample, position, feature) for feature in range(5)] for position in range(6, 10)]
        for sample in (0, 9, 70_000)
    ]
    assert (out > 0).tolist() == expected
