"""Layers split over the tensor-parallel ranks, as in Megatron-LM.

    whole input -> column-split linear -> split activations -> row-split linear -> partial sums
                   (rows of the weight)                        (columns of the weight)

Going in, the input is the same on every rank and its gradient is summed; coming out, the output is
summed and its gradient is the same on every rank. With sequence parallelism the activations outside
such a region cover only this rank's part of the sequence: going in they are gathered, coming out the
sums are scattered.

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
from launcher.runtime.model.split_backward import SplitBackward
from launcher_plugins.parallel.tensor.runtime.collectives import TensorWire, enter, keeping_part, leave
from launcher_plugins.parallel.tensor.runtime.vocabulary import cross_entropy_sum

Sender = TypeVar("Sender", bound=nn.Module)


def apply(ctx: RankContext) -> None:
    """Puts the split layers in place of the whole ones."""
    ctx.layers = TensorLayers(ctx)


class TensorLayers:
    """This rank's slice of every layer. See `launcher.runtime.api.Layers`."""

    def __init__(self, ctx: RankContext) -> None:
        self.size = ctx.groups.tp.size
        self.splits_sequence = ctx.config.parallel.sequence_parallel
        self._wire = TensorWire(ctx, splits_sequence=self.splits_sequence)
        self._device, self._dtype = ctx.device, DTYPES[ctx.config.precision.compute]
        self._split = ctx.split_backward
        is_compiled = ctx.config.fusion.compile != "none"
        self._column = _apart(ColumnLinear) if is_compiled else ColumnLinear
        self._row = _apart(RowLinear) if is_compiled else RowLinear

    def of_stage(self, stage: StagePlan) -> TensorLayers:
        """Where layers are recomputed whole nothing is held, and nothing need be gathered again."""
        if stage.recompute != "full":
            return self
        layers = copy(self)
        layers._wire = copy(self._wire)
        layers._wire.gathers_again = False
        return layers

    def embedding(self, name: str, num_rows: int, size: int) -> nn.Module:
        """tokens [batch, seq] -> [batch, seq(local), size]."""
        return VocabularyEmbedding(self._vocabulary(name, num_rows, size), self._wire)

    def column(self, name: str, in_size: int, outs: Mapping[str, int], *, bias: bool) -> nn.Module:
        """[batch, seq(local), in_size] -> one [batch, seq, out / tp] per entry of ``outs``."""
        weights, biases = [], []
        for out, size in outs.items():
            weights.append(self._slice(f"{name}.{out}.weight", (size, in_size), dim=0))
            if bias:
                biases.append(self._slice(f"{name}.{out}.bias", (size,), dim=0))
        return self._column(weights, biases, self._wire, self._split)

    def row(self, name: str, in_size: int, out_size: int, *, bias: bool) -> nn.Module:
        """[batch, seq, in_size / tp] -> [batch, seq(local), out_size]."""
        weight = self._slice(f"{name}.weight", (out_size, in_size), dim=1)
        whole = GlobalSlice(
            name=f"{name}.bias",
            shape=(out_size,),
            offset=(0,),
            is_sharded=False,
            is_summed_over_tp=self.splits_sequence,
        )
        added = new_parameter(whole, whole.shape, self._device, self._dtype) if bias else None
        return self._row(weight, added, self._wire, self._split)

    def head(self, name: str, num_rows: int, size: int, embedding: nn.Module | None) -> nn.Module:
        """(hidden [batch, seq(local), size], targets [batch, seq]) -> sum of the tokens' cross-entropies."""
        if embedding is not None:
            weight = cast(VocabularyEmbedding, embedding).weight
        else:
            weight = self._vocabulary(name, num_rows, size)
        return VocabularyHead(weight, num_rows, self._wire, self._split)

    def positions(self, seq_length: int) -> slice:
        """This rank's part of the sequence, or all of it without sequence parallelism."""
        if not self.splits_sequence:
            return slice(0, seq_length)
        assert seq_length % self.size == 0, f"{self.size} ranks cannot share {seq_length} positions evenly"
        length = seq_length // self.size
        return slice(self._wire.rank * length, (self._wire.rank + 1) * length)

    def _slice(self, name: str, shape: tuple[int, ...], *, dim: int) -> nn.Parameter:
        """A slice of equal size on every rank; the last ones overhang when tp does not divide."""
        local = list(shape)
        local[dim] = -(-shape[dim] // self.size)
        offset = [0] * len(shape)
        offset[dim] = self._wire.rank * local[dim]
        where = GlobalSlice(name=name, shape=shape, offset=tuple(offset), is_sharded=True)
        return new_parameter(where, local, self._device, self._dtype)

    def _vocabulary(self, name: str, num_rows: int, size: int) -> nn.Parameter:
        return self._slice(f"{name}.weight", (num_rows, size), dim=0)


class ColumnLinear(nn.Module):
    """Linears of one input, each split by its outputs."""

    def __init__(
        self,
        weights: list[nn.Parameter],
        biases: list[nn.Parameter],
        wire: TensorWire,
        split: SplitBackward,
    ) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)
        self._wire, self._split = wire, split

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [batch, seq(local), in] -> [batch, seq, out / tp] of each linear."""
        whole = enter(x, self._wire)
        biases = list(self.biases) or [None] * len(self.weights)
        with keeping_part(x, whole, self._wire, num_uses=len(self.weights)):
            return tuple(
                self._split.linear(whole, weight, bias)
                for weight, bias in zip(self.weights, biases, strict=True)
            )


class RowLinear(nn.Module):
    """A linear split by its inputs; its whole bias is added once, after the sum."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, wire: TensorWire, split: SplitBackward
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._wire, self._split = wire, split

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, in / tp] -> [batch, seq(local), out]."""
        out = leave(self._split.linear(x, self.weight), self._wire)
        return out if self.bias is None else out + self.bias


def _apart(layer: type[Sender]) -> type[Sender]:
    """The class with a forward that stays out of what is compiled around it, as its messages must. One for
    all layers: a function of each instance would be compiled around anew."""
    forward = torch.compiler.disable(layer.forward)  # type: ignore[no-untyped-call]
    return cast(type[Sender], type(layer.__name__, (layer,), {"forward": forward}))


class VocabularyEmbedding(nn.Module):
    """A table split by tokens: a token outside the slice gives 0, and the sum has every row."""

    def __init__(self, weight: nn.Parameter, wire: TensorWire) -> None:
        super().__init__()
        self.weight = weight
        self._wire = wire

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, seq] -> [batch, seq(local), size]."""
        num_rows = self.weight.shape[0]
        local = tokens - self._wire.rank * num_rows
        is_elsewhere = (local < 0) | (local >= num_rows)
        rows = functional.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return leave(rows.masked_fill(is_elsewhere[..., None], 0), self._wire)


class VocabularyHead(nn.Module):
    """Projection to this rank's part of the vocabulary, and the loss over all parts."""

    def __init__(self, weight: nn.Parameter, vocab_size: int, wire: TensorWire, split: SplitBackward) -> None:
        super().__init__()
        self.weight = weight
        self._vocab_size = vocab_size
        self._wire, self._split = wire, split

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(hidden [batch, seq(local), size], targets [batch, seq]) -> fp32 sum of cross-entropies."""
        whole = enter(hidden, self._wire)
        with keeping_part(hidden, whole, self._wire, num_uses=1):
            logits = self._split.linear(whole, self.weight).float()
        first_row = self._wire.rank * self.weight.shape[0]
        num_padding = min(max(0, first_row + self.weight.shape[0] - self._vocab_size), self.weight.shape[0])
        if num_padding:
            is_padding = torch.arange(-logits.shape[-1], 0, device=logits.device) >= -num_padding
            logits = logits.masked_fill(is_padding, -torch.inf)
        return cross_entropy_sum(logits, targets - first_row, targets, self._wire)
