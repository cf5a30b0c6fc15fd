"""Layers split over the tensor-parallel ranks, as in Megatron-LM.

    whole input -> column-parallel linear -> split activations -> row-parallel linear -> partial sums
                   (splits the rows of the weight)                (splits its columns)

The input of such a region is copied to every rank and its gradient is reduced; the output is reduced and its
gradient is the same on every rank. With sequence parallelism the activations outside of a region cover only
this rank's part of the sequence: the input is all-gathered, the output is reduce-scattered.

Source: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al. (2022), section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.contract.plan import StagePlan
from launcher.runtime.api import DTYPES, GlobalSlice, RankContext, new_parameter
from launcher.runtime.model.deferred_weight_gradients import SplitBackward
from launcher.runtime.model.layers import Layers
from launcher_plugins.parallel.tensor.runtime.collectives import (
    TensorParallelGroup,
    copy_to_region,
    reduce_from_region,
    saving_shard,
)
from launcher_plugins.parallel.tensor.runtime.vocabulary import cross_entropy_sum

Layer = TypeVar("Layer", bound=nn.Module)


def apply(ctx: RankContext) -> None:
    """Replaces the unsharded layers by tensor-parallel ones."""
    ctx.layers = TensorLayers(ctx)


class TensorLayers(Layers):
    """This rank's slice of every layer."""

    def __init__(self, ctx: RankContext) -> None:
        super().__init__(ctx.device, DTYPES[ctx.config.precision.compute], ctx.split_backward)
        self.size = ctx.groups.tp.size
        self.splits_sequence = ctx.config.parallel.sequence_parallel
        self._group = TensorParallelGroup(ctx, splits_sequence=self.splits_sequence)
        is_compiled = ctx.config.fusion.compile != "none"
        self._column = _uncompiled(ColumnParallelLinear) if is_compiled else ColumnParallelLinear
        self._row = _uncompiled(RowParallelLinear) if is_compiled else RowParallelLinear

    def for_stage(self, stage: StagePlan) -> TensorLayers:
        """Under full recomputation a region saves nothing, and need not gather its input again."""
        if stage.recompute != "full":
            return self
        layers = copy(self)
        layers._group = copy(self._group)
        layers._group.saves_shard = False
        return layers

    def embedding(self, name: str, num_rows: int, size: int) -> nn.Module:
        """tokens [batch, seq] -> [batch, seq(local), size]."""
        return VocabParallelEmbedding(self._slice(f"{name}.weight", (num_rows, size), dim=0), self._group)

    def column(self, name: str, in_size: int, outs: Mapping[str, int], *, bias: bool) -> nn.Module:
        """[batch, seq(local), in_size] -> one [batch, seq, out / tp] per entry of ``outs``."""
        weights, biases = [], []
        for out, size in outs.items():
            weights.append(self._slice(f"{name}.{out}.weight", (size, in_size), dim=0))
            if bias:
                biases.append(self._slice(f"{name}.{out}.bias", (size,), dim=0))
        return self._column(weights, biases, self._group, self._deferral)

    def row(self, name: str, in_size: int, out_size: int, *, bias: bool) -> nn.Module:
        """[batch, seq, in_size / tp] -> [batch, seq(local), out_size]."""
        weight = self._slice(f"{name}.weight", (out_size, in_size), dim=1)
        whole = self.replicated(f"{name}.bias", out_size) if bias else None
        return self._row(weight, whole, self._group, self._deferral)

    def head(self, name: str, num_rows: int, size: int, tied: nn.Parameter | None) -> nn.Module:
        """(hidden [batch, seq(local), size], targets [batch, seq]) -> sum of the tokens' cross-entropies."""
        weight = self._slice(f"{name}.weight", (num_rows, size), dim=0) if tied is None else tied
        return VocabParallelHead(weight, num_rows, self._group, self._deferral)

    def positions(self, seq_length: int) -> slice:
        """This rank's part of the sequence, or all of it without sequence parallelism."""
        if not self.splits_sequence:
            return slice(0, seq_length)
        assert seq_length % self.size == 0, f"{self.size} ranks cannot share {seq_length} positions evenly"
        length = seq_length // self.size
        return slice(self._group.rank * length, (self._group.rank + 1) * length)

    def _slice(self, name: str, shape: tuple[int, ...], *, dim: int) -> nn.Parameter:
        """A slice of equal size on every rank; the last ones are padded when tp does not divide."""
        local = list(shape)
        local[dim] = -(-shape[dim] // self.size)
        offset = [0] * len(shape)
        offset[dim] = self._group.rank * local[dim]
        where = GlobalSlice(name=name, shape=shape, offset=tuple(offset), is_sharded=True)
        return new_parameter(where, local, self._device, self._dtype)


class ColumnParallelLinear(nn.Module):
    """Linears with one input, each split by its outputs."""

    def __init__(
        self,
        weights: list[nn.Parameter],
        biases: list[nn.Parameter],
        group: TensorParallelGroup,
        deferral: SplitBackward,
    ) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)
        self._group, self._deferral = group, deferral

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [batch, seq(local), in] -> [batch, seq, out / tp] of each linear."""
        whole = copy_to_region(x, self._group)
        biases = list(self.biases) or [None] * len(self.weights)
        with saving_shard(x, whole, self._group, num_uses=len(self.weights)):
            return tuple(
                self._deferral.linear(whole, weight, bias)
                for weight, bias in zip(self.weights, biases, strict=True)
            )


class RowParallelLinear(nn.Module):
    """A linear split by its inputs; its whole bias is added once, after the sum."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: TensorParallelGroup,
        deferral: SplitBackward,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._group, self._deferral = group, deferral

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, in / tp] -> [batch, seq(local), out]."""
        out = reduce_from_region(self._deferral.linear(x, self.weight), self._group)
        return out if self.bias is None else out + self.bias


def _uncompiled(layer: type[Layer]) -> type[Layer]:
    """The class with a forward that torch.compile leaves out, because of its collectives. One class for all
    layers: with a function for each instance torch would recompile the code around it."""
    forward = torch.compiler.disable(layer.forward)  # type: ignore[no-untyped-call]
    return cast(type[Layer], type(layer.__name__, (layer,), {"forward": forward}))


class VocabParallelEmbedding(nn.Module):
    """A table split by tokens: a token outside the slice has a row of zeros, and the sum has every row."""

    def __init__(self, weight: nn.Parameter, group: TensorParallelGroup) -> None:
        super().__init__()
        self.weight = weight
        self._group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, seq] -> [batch, seq(local), size]."""
        num_rows = self.weight.shape[0]
        local = tokens - self._group.rank * num_rows
        is_elsewhere = (local < 0) | (local >= num_rows)
        rows = functional.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return reduce_from_region(rows.masked_fill(is_elsewhere[..., None], 0), self._group)


class VocabParallelHead(nn.Module):
    """Projection to this rank's part of the vocabulary, and the loss over all parts."""

    def __init__(
        self, weight: nn.Parameter, vocab_size: int, group: TensorParallelGroup, deferral: SplitBackward
    ) -> None:
        super().__init__()
        self.weight = weight
        self._vocab_size = vocab_size
        self._group, self._deferral = group, deferral

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(hidden [batch, seq(local), size], targets [batch, seq]) -> fp32 sum of cross-entropies."""
        whole = copy_to_region(hidden, self._group)
        with saving_shard(hidden, whole, self._group, num_uses=1):
            logits = self._deferral.linear(whole, self.weight).float()
        first_row = self._group.rank * self.weight.shape[0]
        num_padding = min(max(0, first_row + self.weight.shape[0] - self._vocab_size), self.weight.shape[0])
        if num_padding:
            is_padding = torch.arange(-logits.shape[-1], 0, device=logits.device) >= -num_padding
            logits = logits.masked_fill(is_padding, -torch.inf)
        return cross_entropy_sum(logits, targets - first_row, targets, self._group)
