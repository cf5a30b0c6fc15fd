"""What the runtime half of a plugin may use: the context of a rank, and the interfaces it fills in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from launcher.config.schema import LaunchConfig, OptimConfig
from launcher.plan.model import RankPlan, StagePlan
from launcher.runtime.groups import Group, Groups
from launcher.runtime.metrics import Clock


@dataclass(frozen=True, kw_only=True)
class GlobalSlice:
    """Which part of which global tensor a local parameter is: a box at ``offset``."""

    name: str
    """Global name, the same under every layout, such as ``layers.3.attention.qkv.weight``."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    offset: tuple[int, ...]
    """Where the local tensor begins in each dim."""
    is_sharded: bool
    """Whether the tensor-parallel ranks hold different slices (else equal copies)."""
    is_tied_copy: bool = False
    """A second copy of a parameter that another stage owns (tied embeddings)."""


@dataclass(frozen=True, kw_only=True)
class GlobalFragment:
    """A piece of state under its global name, for checkpoints."""

    slice: GlobalSlice
    tensor: Tensor


class FragmentReader(Protocol):
    """Reads any box of any global tensor from a checkpoint."""

    def __call__(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What an update did."""

    grad_norm: float
    """Norm of the whole model's gradient before clipping."""
    lr: float
    skipped: bool = False


class Update(Protocol):
    """Owns the parameters' update; exactly one per run, so that the loop never forks.

    The executor calls `backward` for every B of the rank; ``last`` is true for the last B of each
    chunk in the step, from which on that chunk's gradients are final.
    """

    def prepare(self, chunks: list[nn.Module], optim: OptimConfig, ctx: RankContext) -> list[nn.Module]:
        """Takes over the chunks' parameters; returns the modules to run."""
        ...

    def begin(self, step: int) -> None:
        """Before the first forward of a step."""
        ...

    def backward(self, out: Tensor, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        """Backward of one microbatch. ``grad``: gradient of ``out``, None for the loss."""
        ...

    def apply(self, step: int) -> StepOutcome:
        """Finishes the gradient exchange, clips, updates the parameters, clears the gradients."""
        ...

    def state(self) -> Iterable[GlobalFragment]:
        """Master weights and optimizer state under global names."""
        ...

    def load(self, read: FragmentReader) -> None:
        """Takes back what `state` gave, under any layout."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


class Transport(Protocol):
    """Point-to-point messages between neighbouring stages."""

    def receive(self, buffer: Tensor, source: int, tag: int) -> Any:
        """Posts a receive from a pp_rank; returns a handle with ``wait()``."""
        ...

    def send(self, tensor: Tensor, destination: int, tag: int) -> Any:
        """Starts a send to a pp_rank without blocking; returns a handle with ``wait()``."""
        ...


class Layers(Protocol):
    """Makes the layers that tensor parallelism may split. Shapes in and out are those of one device
    but for the dims that are said to be local."""

    size: int
    """Ways of the split (1 = whole)."""

    def embedding(self, name: str, num_rows: int, size: int) -> nn.Module:
        """tokens [batch, seq] -> [batch, seq(local if sequence-parallel), size]."""
        ...

    def column(self, name: str, in_size: int, out_sizes: Sequence[int], *, bias: bool) -> nn.Module:
        """[batch, seq(local), in_size] -> one [batch, seq, out(local)] per entry of ``out_sizes``,
        each split on its own (such as q, k, v)."""
        ...

    def row(self, name: str, in_size: int, out_size: int, *, bias: bool) -> nn.Module:
        """[batch, seq, in(local)] -> [batch, seq(local), out_size], summed over the ranks."""
        ...

    def head(self, name: str, num_rows: int, size: int, embedding: nn.Module | None) -> nn.Module:
        """(hidden [batch, seq(local), size], targets [batch, seq]) -> sum over tokens of the
        cross-entropy (scalar); ``embedding``: shares its weight when tied."""
        ...

    def positions(self, seq_length: int) -> slice:
        """The positions of the sequence that this rank's activations cover between split regions."""
        ...


@dataclass(kw_only=True)
class RankContext:
    """Everything one rank knows. The runtime halves of the parallel plugins equip it in turn."""

    plan: RankPlan
    device: torch.device
    groups: Groups
    clock: Clock
    layers: Layers
    """Whole layers; tensor parallelism puts its own in place."""
    transport: Transport | None = None
    """Set by pipeline parallelism."""
    reduce_gradients: Callable[..., Any] | None = None
    """Set by data parallelism: makes the exchange of gradient buckets."""

    @property
    def config(self) -> LaunchConfig:
        """The run's settings."""
        return self.plan.plan.config
