"""Ranges of a flattened tensor as boxes, against every element counted."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
import torch

from launcher.runtime.checkpoint.fragments import boxes


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 5), (4, 3), (3, 1), (2, 3, 4), (2, 1, 3)])
def test_boxes_cover_a_range_once_in_order(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    whole = torch.arange(numel).view(shape)
    for start, stop in combinations_with_replacement(range(numel + 1), 2):
        found = []
        for box in boxes(shape, start, stop):
            part = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
            assert part.shape == box.shape
            assert part.flatten().tolist() == list(range(box.start, box.start + box.numel))
            found += part.flatten().tolist()
        assert found == list(range(start, stop))


def test_a_range_of_a_matrix_is_at_most_three_boxes() -> None:
    for start, stop in combinations_with_replacement(range(5 * 4 + 1), 2):
        assert len(list(boxes((5, 4), start, stop))) <= 3
