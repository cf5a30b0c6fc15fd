"""This rank's partition of DeepSpeed's states, as pieces of global tensors.

DeepSpeed flattens many parameters into one tensor and splits it into equal partitions, so a partition begins
and ends anywhere inside a parameter. Such a range is a few boxes of the parameter: saved under their global
names, they can be read under any other layout, DeepSpeed's or the native one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.runtime.api import FragmentReader, GlobalFragment, GlobalSlice, slice_of
from launcher.runtime.checkpoint.fragments import KINDS, MOMENTS, Box, boxes, state_slice


@dataclass(frozen=True, kw_only=True)
class OwnedPart:
    """The range of one parameter's elements that this rank updates."""

    where: GlobalSlice
    shape: tuple[int, ...]
    """Local shape of the whole parameter."""
    start: int
    numel: int
    flat: Tensor
    """The optimizer's own tensor: the flattened fp32 weights of every range on this rank."""
    flat_start: int
    """First element of this range in it."""

    def pieces(self) -> Iterator[tuple[GlobalSlice, Box, tuple[slice, ...]]]:
        """The boxes of the range: the global slice of each, and its part without padding."""
        unpadded = self.where.unpadded_shape(self.shape)
        for box in boxes(self.shape, self.start, self.start + self.numel):
            pairs = zip(box.offset, box.shape, unpadded, strict=True)
            kept = [max(0, min(offset + size, end) - offset) for offset, size, end in pairs]
            if 0 in kept:
                continue
            corner = tuple(a + b for a, b in zip(self.where.offset, box.offset, strict=True))
            where = GlobalSlice(
                name=self.where.name, shape=self.where.shape, offset=corner, is_sharded=self.where.is_sharded
            )
            yield where, box, tuple(slice(0, size) for size in kept)

    def box_view(self, tensor: Tensor, box: Box) -> Tensor:
        """A box of this range, in its shape, of a tensor laid out as ``flat``."""
        return tensor.narrow(0, self.flat_start + box.start - self.start, box.numel).view(box.shape)


def owned_parts(optimizer: Any, params: Sequence[nn.Parameter]) -> list[OwnedPart]:
    """What this rank owns of each parameter. ``optimizer``: DeepSpeed's, of any stage."""
    find = _at_stage_3 if hasattr(params[0], "ds_id") else _below_stage_3
    parts = (find(optimizer, param) for param in params)
    return [part for part in parts if part is not None and part.numel > 0]


def _below_stage_3(optimizer: Any, param: Any) -> OwnedPart | None:
    mapping = param._hp_mapping
    if mapping is None:
        return None
    (flat,) = optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
    return OwnedPart(
        where=slice_of(param),
        shape=tuple(param.shape),
        start=mapping.lp_fragment_address.start,
        numel=mapping.lp_fragment_address.numel,
        flat=flat,
        flat_start=mapping.hp_fragment_address.start,
    )


def _at_stage_3(optimizer: Any, param: Any) -> OwnedPart:
    group, flat_start, size = optimizer.grad_position[optimizer.get_param_id(param)]
    start = size * param.ds_zero_partition_rank
    return OwnedPart(
        where=slice_of(param),
        shape=tuple(param.ds_shape),
        start=start,
        numel=max(0, min(size, param.ds_numel - start)),
        flat=optimizer.fp32_partitioned_groups_flat[group],
        flat_start=flat_start,
    )


def fragments(optimizer: Any, parts: Sequence[OwnedPart]) -> Iterator[GlobalFragment]:
    """Weights and moments of some parts."""
    for part in parts:
        for kind in KINDS:
            tensor = _tensor(optimizer, part, kind)
            for where, box, kept in part.pieces():
                view = part.box_view(tensor, box) if tensor is not None else torch.zeros(box.shape)
                yield GlobalFragment(slice=state_slice(where, kind), tensor=view[kept])


@torch.no_grad()
def fill(optimizer: Any, parts: Sequence[OwnedPart], num_updates: int, read: FragmentReader) -> None:
    """Restores what `fragments` returned, under any layout."""
    for flat in {id(part.flat): part.flat for part in parts}.values():
        step = torch.tensor(float(num_updates), device=flat.device)
        moments = {kind: torch.zeros_like(flat) for kind in MOMENTS}
        optimizer.optimizer.state[flat] = {"step": step, **moments}
    for part in parts:
        for kind in KINDS:
            tensor = _tensor(optimizer, part, kind)
            assert tensor is not None, "the moments were made above"
            for where, box, kept in part.pieces():
                size = tuple(span.stop for span in kept)
                part.box_view(tensor, box)[kept] = read(state_slice(where, kind).name, where.offset, size)


def _tensor(optimizer: Any, part: OwnedPart, kind: str) -> Tensor | None:
    """The flat tensor of one kind of state; None for a moment before the first update."""
    if kind == "weight":
        return part.flat.detach()
    moment: Tensor | None = optimizer.optimizer.state.get(part.flat, {}).get(kind)
    return moment


@torch.no_grad()
def refresh_weights(optimizer: Any, params: Sequence[nn.Parameter]) -> None:
    """Copies the fp32 weights to those of the compute format. Collective over the replicas."""
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
        return
    for param in params:
        group, start, size = optimizer.grad_position[optimizer.get_param_id(param)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        param.ds_tensor.data.copy_(flat.detach().narrow(0, start, size))  # type: ignore[attr-defined]


def num_good_steps(scaler: Any) -> int:
    """Steps since the last overflow, of DeepSpeed's loss scale."""
    return int(scaler.cur_iter - scaler.last_overflow_iter - 1)


def set_num_good_steps(scaler: Any, number: int) -> None:
    """Sets the number of steps without overflow of DeepSpeed's loss scale."""
    scaler.last_overflow_iter = scaler.cur_iter - number - 1
