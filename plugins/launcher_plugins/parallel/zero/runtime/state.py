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

from launcher.contract.config import LaunchConfig
from launcher.runtime.api import FragmentReader, GlobalFragment, GlobalSlice, slice_of
from launcher.runtime.checkpoint.fragments import fill, frozen_weights, state_fragments
from launcher.runtime.train.optimizer import set_state, state_shapes, state_tensors


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

    def fragments(self, optimizer: Any, config: LaunchConfig) -> Iterator[GlobalFragment]:
        """Its weights and the optimizer's states, as views; states of zeros before the first update."""
        tensors = state_tensors(
            optimizer.optimizer, self.flat, state_shapes(config, self.where, self.flat.shape)
        )
        ranges = {kind: tensor.narrow(0, self.flat_start, self.numel) for kind, tensor in tensors.items()}
        yield from state_fragments(self.where, self.shape, ranges, self.start)


def owned_parts(optimizer: Any, params: Sequence[nn.Parameter]) -> list[OwnedPart]:
    """What this rank owns of each parameter. ``optimizer``: DeepSpeed's, of any stage."""
    parts = (
        (_at_stage_3 if hasattr(param, "ds_id") else _below_stage_3)(optimizer, param) for param in params
    )
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


def frozen_parts(params: Sequence[Any], *, is_first: bool) -> Iterator[GlobalFragment]:
    """This rank's part, as views, of weights that are not trained: split at stage 3, below it the first
    replica's."""
    if is_first:
        yield from frozen_weights(param for param in params if not hasattr(param, "ds_id"))
    for param in params:
        if hasattr(param, "ds_id") and not param.requires_grad:
            part = param.ds_tensor.detach().view(-1)
            start = part.numel() * param.ds_zero_partition_rank
            weight = {"weight": part[: max(0, param.ds_numel - start)]}
            yield from state_fragments(slice_of(param), tuple(param.ds_shape), weight, start)


def load(
    optimizer: Any, parts: Sequence[OwnedPart], num_updates: int, read: FragmentReader, config: LaunchConfig
) -> None:
    """Restores the `fragments` of some parts, under any layout."""
    for part in {id(part.flat): part for part in parts}.values():
        shapes = state_shapes(config, part.where, part.flat.shape)
        states = {kind: part.flat.new_zeros(shape) for kind, shape in shapes.items()}
        set_state(optimizer.optimizer, part.flat, states, num_updates)
    for part in parts:
        fill(part.fragments(optimizer, config), read)


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
