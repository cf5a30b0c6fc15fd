"""The layers of a model, without tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.contract.plan import StagePlan
from launcher.runtime.api import IGNORE_INDEX, GlobalSlice, new_parameter
from launcher.runtime.model.deferred_weight_gradients import SplitBackward


class Layers:
    """Makes the layers of a model: whole ones; tensor parallelism overrides what it splits. Shapes in and out
    are those of one device except for dims marked as local.

    Parameters are uninitialised (the model fills them, each value by its global position) and carry
    their `GlobalSlice`.
    """

    size = 1
    """Number of tensor-parallel ranks (1: layers are whole)."""
    splits_sequence = False
    """Sequence parallelism: whether activations outside the tensor-parallel regions cover only `positions`
    of the sequence. Replicated parameters are used there, and are marked ``is_summed_over_tp``."""

    def __init__(self, device: torch.device, dtype: torch.dtype, deferral: SplitBackward) -> None:
        self._device, self._dtype, self._deferral = device, dtype, deferral

    def for_stage(self, stage: StagePlan) -> Layers:
        """The layers for one stage: what they save for the backward may depend on its recomputation."""
        return self

    def embedding(self, name: str, num_rows: int, size: int) -> nn.Module:
        """tokens [batch, seq] -> [batch, seq(local), size]."""
        return Embedding(self.replicated(f"{name}.weight", num_rows, size))

    def column(self, name: str, in_size: int, outs: Mapping[str, int], *, bias: bool) -> nn.Module:
        """[batch, seq(local), in_size] -> one [batch, seq, out(local)] per entry of ``outs`` (name
        and size of each output, such as q, k, v), each split on its own."""
        return Linears([self._linear(f"{name}.{out}", in_size, outs[out], bias) for out in outs])

    def row(self, name: str, in_size: int, out_size: int, *, bias: bool) -> nn.Module:
        """[batch, seq, in(local)] -> [batch, seq(local), out_size], summed over the ranks."""
        return self._linear(name, in_size, out_size, bias)

    def head(self, name: str, num_rows: int, size: int, tied: nn.Parameter | None) -> nn.Module:
        """(hidden [batch, seq(local), size], targets [batch, seq]) -> sum over tokens of the
        cross-entropy (fp32 scalar); targets of `IGNORE_INDEX` add nothing. ``tied``: the embedding's weight,
        where the head shares it."""
        weight = self.replicated(f"{name}.weight", num_rows, size) if tied is None else tied
        return Head(weight, self._deferral)

    def positions(self, seq_length: int) -> slice:
        """The positions of the sequence that this rank's activations cover outside tensor-parallel
        regions."""
        return slice(0, seq_length)

    def replicated(self, name: str, *shape: int, is_in_region: bool = False) -> nn.Parameter:
        """A parameter that every tensor-parallel rank has whole. ``is_in_region``: it is used inside a split
        region, so that each rank sees the gradient of its own part alone."""
        is_summed = self.splits_sequence or (is_in_region and self.size > 1)
        where = GlobalSlice.unsharded(name, shape, is_summed_over_tp=is_summed)
        return new_parameter(where, shape, self._device, self._dtype)

    def _linear(self, name: str, in_size: int, out_size: int, bias: bool) -> Linear:
        weight = self.replicated(f"{name}.weight", out_size, in_size)
        return Linear(weight, self.replicated(f"{name}.bias", out_size) if bias else None, self._deferral)


class Linear(nn.Module):
    """x [..., in] -> [..., out]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, deferral: SplitBackward) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._deferral = deferral

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self._deferral.linear(x, self.weight, self.bias)


class Linears(nn.Module):
    """Several linears with one input."""

    def __init__(self, linears: list[Linear]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [batch, seq, in] -> [batch, seq, out] of each linear."""
        return tuple(linear(x) for linear in self.linears)


class Embedding(nn.Module):
    """A table with a row for each token."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, seq] -> [batch, seq, size]."""
        return functional.embedding(tokens, self.weight)


class Head(nn.Module):
    """Projection to the vocabulary and the loss."""

    def __init__(self, weight: nn.Parameter, deferral: SplitBackward) -> None:
        super().__init__()
        self.weight = weight
        self._deferral = deferral

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(hidden [batch, seq, size], targets [batch, seq]) -> fp32 sum of cross-entropies."""
        logits = self._deferral.linear(hidden, self.weight).float()
        return functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
