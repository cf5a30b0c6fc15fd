"""Collectives over several tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.runtime.groups import Group


def sum_in_one_message(tensors: Sequence[Tensor], group: Group) -> None:
    """Sums each tensor over a group, in place; all travel together."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group.handle)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
