"""Names and slices of the optimizer's state, so that any layout can read what another wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from launcher.base.errors import JobError
from launcher.base.units import counted
from launcher.runtime.api import FragmentReader, GlobalFragment, GlobalSlice, slice_of
from launcher.runtime.process.log import log

WEIGHT = "weight"
"""The kind of state that every parameter has; the others are those of its optimizer."""
STEP, LOSS_SCALE, NUM_GOOD_STEPS = "optimizer/step", "optimizer/loss_scale", "optimizer/num_good_steps"


def state_name(kind: str, name: str) -> str:
    """The global name of one kind of a parameter's state.

    >>> state_name("exp_avg", "layers.3.mlp_norm.weight")
    'exp_avg/layers.3.mlp_norm.weight'
    """
    return f"{kind}/{name}"


def scalar_fragment(name: str, value: float) -> GlobalFragment:
    """A number of the optimizer as a fragment without dims."""
    return GlobalFragment(slice=GlobalSlice.unsharded(name, ()), tensor=torch.tensor(value))


def whole_state(where: GlobalSlice, state: Mapping[str, Tensor]) -> Iterator[GlobalFragment]:
    """All states of a parameter, each a view. One that has not the shape of the parameter (a mean of its
    rows) is of no split one, and a global tensor of its own."""
    shape = state[WEIGHT].shape
    for kind, tensor in state.items():
        own = where if tensor.shape == shape else GlobalSlice.unsharded(where.name, tensor.shape)
        yield from state_fragments(own, tensor.shape, {kind: tensor})


def state_fragments(
    where: GlobalSlice, shape: Sequence[int], state: Mapping[str, Tensor], start: int = 0
) -> Iterator[GlobalFragment]:
    """A parameter's state as boxes of global tensors, without padding; each a view.

    ``shape``: local shape of the whole parameter; ``state``: by kind, a contiguous tensor of its elements
    from number ``start`` on.
    """
    unpadded = where.unpadded_shape(shape)
    for kind, tensor in state.items():
        flat = tensor.view(-1)
        for box in boxes(shape, start, start + flat.numel()):
            spans = zip(box.offset, box.shape, unpadded, strict=True)
            kept = [max(0, min(offset + size, end) - offset) for offset, size, end in spans]
            if 0 in kept:
                continue
            part = flat.narrow(0, box.start - start, box.numel).view(box.shape)
            corner = tuple(a + b for a, b in zip(where.offset, box.offset, strict=True))
            part_of = replace(where, name=state_name(kind, where.name), offset=corner)
            yield GlobalFragment(slice=part_of, tensor=part[tuple(map(slice, kept))])


def frozen_weights(params: Iterable[nn.Parameter]) -> Iterator[GlobalFragment]:
    """The weights, as views without padding, of parameters that are not trained; no replica splits them."""
    for where, param in ((slice_of(param), param) for param in params if not param.requires_grad):
        named = replace(where, name=state_name(WEIGHT, where.name))
        kept = where.unpadded_shape(param.shape)
        if 0 not in kept:
            yield GlobalFragment(slice=named, tensor=param.detach()[tuple(map(slice, kept))])


def owned(fragments: Iterable[GlobalFragment], tp_rank: int) -> Iterator[GlobalFragment]:
    """Those of which this tp_rank saves the copy."""
    return (fragment for fragment in fragments if fragment.slice.is_owned_by(tp_rank))


class NotSavedError(JobError):
    """A tensor that a checkpoint does not hold, as those of earlier versions hold no weights that are not
    trained."""


def fill_frozen(fragments: Iterable[GlobalFragment], read: FragmentReader) -> None:
    """Reads weights that are not trained. From a checkpoint of a version that did not save them, they are
    left as the model was built: their values depend on the user's code and the seed alone."""
    kept = set()
    for fragment in fragments:
        try:
            fill([fragment], read)
        except NotSavedError:
            kept.add(fragment.slice.name)
    if kept:
        weights = counted(len(kept), "weight")
        log(f"an older checkpoint without {weights} that are not trained: made again as at the start")


@torch.no_grad()
def fill(fragments: Iterable[GlobalFragment], read: FragmentReader) -> None:
    """Reads every fragment into its tensor."""
    for fragment in fragments:
        tensor = fragment.tensor
        tensor.copy_(read(fragment.slice.name, fragment.slice.offset, tensor.shape))


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
    row, inner = prod(shape[1:]), tuple(shape[1:])
    first_whole = min(stop, -(-start // row) * row)
    end_of_whole = max(first_whole, stop // row * row)
    yield from _in_row(shape, start, first_whole)
    if num_rows := (end_of_whole - first_whole) // row:
        offset = (first_whole // row, *(0 for _ in inner))
        yield Box(start=first_whole, offset=offset, shape=(num_rows, *inner))
    yield from _in_row(shape, end_of_whole, stop)


def _in_row(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes of a range that lies inside one row."""
    row = prod(shape[1:])
    index = start // row
    for box in boxes(shape[1:], start - index * row, stop - index * row):
        yield Box(start=box.start + index * row, offset=(index, *box.offset), shape=(1, *box.shape))
