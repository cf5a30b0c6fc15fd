"""The settings of every optimizer, and of its learning rate by step; those of one are its plugin's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from launcher.typed.read import REST, read_or_raise, read_unless
from launcher.typed.scalars import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, a plugin, and its learning-rate schedule."""

    name: str
    """Name of an optimizer plugin, such as ``adamw``."""
    lr: PositiveFloat
    """Peak learning rate."""
    weight_decay: NonNegativeFloat
    """Decay of the weights, decoupled where the optimizer does not say otherwise; applied to tensors of two
    and more dims."""
    clip_norm: PositiveFloat | None
    """Largest gradient norm over the whole model; null = no clipping."""
    warmup_steps: NonNegativeInt
    """Steps in which the learning rate grows linearly from 0 to ``lr``."""
    decay: Literal["cosine", "linear", "constant"]
    """How the learning rate falls after the warm-up."""
    min_lr_fraction: Fraction = field(metadata=read_unless("optim.decay", "constant"))
    """Learning rate at the end of the decay as a share of ``lr``."""
    decay_steps: PositiveInt | None = field(default=None, metadata=read_unless("optim.decay", "constant"))
    """Number of steps after which the learning rate falls no more; null = ``train.num_steps``. One that is
    given leaves the learning rates as they are when a run goes on to more steps."""
    options: Mapping[str, Any] = field(default_factory=dict, metadata=REST)
    """Every other key of the YAML node, checked against the optimizer's ``Config``."""

    def settings(self, declared: type[Settings]) -> Settings:
        """The options as the optimizer's own ``Config``, once planning has checked them."""
        return read_or_raise(declared, self.options)
