"""Names and slices of the optimizer's state, so that any layout can read what another wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from launcher.runtime.api import GlobalFragment, GlobalSlice

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two moments, by torch's names."""
KINDS = ("weight", *MOMENTS)
"""What is saved of every parameter."""
STEP, LOSS_SCALE, NUM_GOOD_STEPS = "optimizer/step", "optimizer/loss_scale", "optimizer/num_good_steps"


def state_name(kind: str, name: str) -> str:
    """The global name of one kind of a parameter's state.

    >>> state_name("exp_avg", "layers.3.mlp_norm.weight")
    'exp_avg/layers.3.mlp_norm.weight'
    """
    return f"{kind}/{name}"


def state_slice(where: GlobalSlice, kind: str) -> GlobalSlice:
    """The slice of the global tensor that holds one kind of a parameter's state."""
    return replace(where, name=state_name(kind, where.name))


def scalar_fragment(name: str, value: float) -> GlobalFragment:
    """A number of the optimizer as a fragment without dims."""
    return GlobalFragment(slice=GlobalSlice.unsharded(name, ()), tensor=torch.tensor(value))


def adam_state(optimizer: torch.optim.Optimizer, master: Tensor) -> dict[str, Tensor]:
    """A master weight and Adam's moments of it, by kind; the moments are zero before the first update."""
    known = optimizer.state.get(master, {})
    moments = {kind: known.get(kind, torch.zeros_like(master)) for kind in MOMENTS}
    return {"weight": master.detach(), **moments}


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a flattened tensor that is a box of the tensor itself."""

    start: int
    """Its first element among all of the tensor's, row by row."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements, which are contiguous in the flattened tensor."""
        return prod(self.shape)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements ``start`` to ``stop`` of a flattened tensor as the fewest boxes: the end of a row, whole
    rows, the beginning of a row.

    >>> [(box.offset, box.shape) for box in boxes((4, 3), 1, 8)]
    [((0, 1), (1, 2)), ((1, 0), (1, 3)), ((2, 0), (1, 2))]
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box(start=start, offset=(start,) if shape else (), shape=(stop - start,) if shape else ())
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    first_is_cut, last_is_cut = start % row != 0, stop % row != 0
    if first == last and (first_is_cut or last_is_cut):
        yield from _in_row(shape, first, start, stop)
        return
    if first_is_cut:
        yield from _in_row(shape, first, start, (first + 1) * row)
        first += 1
    num_whole = last - first + (not last_is_cut)
    if num_whole:
        inner = tuple(shape[1:])
        yield Box(start=first * row, offset=(first, *(0 for _ in inner)), shape=(num_whole, *inner))
    if last_is_cut:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    """Boxes of a range that lies inside row ``index``."""
    before = index * prod(shape[1:])
    for box in boxes(shape[1:], start - before, stop - before):
        yield Box(start=box.start + before, offset=(index, *box.offset), shape=(1, *box.shape))
