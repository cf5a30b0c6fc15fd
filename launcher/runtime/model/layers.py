"""The layers of a model that no tensor parallelism splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.contract.plan import StagePlan
from launcher.runtime.api import IGNORED, GlobalSlice, new_parameter
from launcher.runtime.model.split_backward import SplitBackward


class WholeLayers:
    """Every layer whole on this rank. See `launcher.runtime.api.Layers`."""

    size = 1
    splits_sequence = False

    def __init__(self, device: torch.device, dtype: torch.dtype, split: SplitBackward) -> None:
        self._device, self._dtype, self._split = device, dtype, split

    def of_stage(self, stage: StagePlan) -> WholeLayers:
        """The same for every stage."""
        return self

    def embedding(self, name: str, num_rows: int, size: int) -> nn.Module:
        """tokens [batch, seq] -> [batch, seq, size]."""
        return WholeEmbedding(self._parameter(f"{name}.weight", num_rows, size))

    def column(self, name: str, in_size: int, outs: Mapping[str, int], *, bias: bool) -> nn.Module:
        """[batch, seq, in_size] -> one [batch, seq, out] per entry of ``outs``."""
        return WholeColumn([self._linear(f"{name}.{out}", in_size, outs[out], bias) for out in outs])

    def row(self, name: str, in_size: int, out_size: int, *, bias: bool) -> nn.Module:
        """[batch, seq, in_size] -> [batch, seq, out_size]."""
        return self._linear(name, in_size, out_size, bias)

    def head(self, name: str, num_rows: int, size: int, embedding: nn.Module | None) -> nn.Module:
        """(hidden [batch, seq, size], targets [batch, seq]) -> sum of the tokens' cross-entropies."""
        if embedding is not None:
            return WholeHead(cast(WholeEmbedding, embedding).weight, self._split)
        return WholeHead(self._parameter(f"{name}.weight", num_rows, size), self._split)

    def positions(self, seq_length: int) -> slice:
        """The whole sequence."""
        return slice(0, seq_length)

    def _linear(self, name: str, in_size: int, out_size: int, bias: bool) -> WholeLinear:
        weight = self._parameter(f"{name}.weight", out_size, in_size)
        return WholeLinear(weight, self._parameter(f"{name}.bias", out_size) if bias else None, self._split)

    def _parameter(self, name: str, *shape: int) -> nn.Parameter:
        where = GlobalSlice(name=name, shape=shape, offset=(0,) * len(shape), is_sharded=False)
        return new_parameter(where, shape, self._device, self._dtype)


class WholeLinear(nn.Module):
    """x [..., in] -> [..., out]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, split: SplitBackward) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._split = split

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self._split.linear(x, self.weight, self.bias)


class WholeColumn(nn.Module):
    """Several linears of one input."""

    def __init__(self, linears: list[WholeLinear]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [batch, seq, in] -> [batch, seq, out] of each linear."""
        return tuple(linear(x) for linear in self.linears)


class WholeEmbedding(nn.Module):
    """Rows of a table by token."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, seq] -> [batch, seq, size]."""
        return functional.embedding(tokens, self.weight)


class WholeHead(nn.Module):
    """Projection to the vocabulary and the loss."""

    def __init__(self, weight: nn.Parameter, split: SplitBackward) -> None:
        super().__init__()
        self.weight = weight
        self._split = split

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(hidden [batch, seq, size], targets [batch, seq]) -> fp32 sum of cross-entropies."""
        logits = self._split.linear(hidden, self.weight).float()
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
