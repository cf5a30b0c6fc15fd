"""The settings of every optimizer, and of its learning rate by step; those of one are its plugin's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from launcher.typed.read import REST, read_or_raise, read_unless, read_while
from launcher.typed.scalars import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Parameters, by their names, that are updated in their own way."""

    names: tuple[str, ...]
    """Global names, such as ``embedding.weight`` and ``layers.3.mlp.up.weight``, with the wildcards ``*``
    and ``?``; the same under every layout."""
    lr_factor: PositiveFloat = 1.0
    """What the learning rate of every step is multiplied by."""
    weight_decay: NonNegativeFloat | None = None
    """Decay of these weights, whatever their dims; null = as of other parameters."""
    frozen: bool = False
    """Keep the values of these parameters: they have neither gradient nor optimizer state."""


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
    decay: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
    """How the learning rate falls after the warm-up: along a cosine, or linearly; not at all (``constant``);
    linearly in the last ``cooldown_steps`` (``wsd``: warm-up, stable, decay), until which a resume may make
    ``train.num_steps`` larger; or as 1 / sqrt(step), whatever the number of steps (``inverse_sqrt``)."""
    min_lr_fraction: Fraction = field(metadata=read_unless("optim.decay", "constant"))
    """Learning rate at the end of the decay as a share of ``lr``; the least one of ``inverse_sqrt``."""
    decay_steps: PositiveInt | None = field(default=None, metadata=read_unless("optim.decay", "constant"))
    """Number of steps after which the learning rate falls no more; null = ``train.num_steps``. One that is
    given leaves the learning rates as they are when a run goes on to more steps."""
    cooldown_steps: PositiveInt | None = field(default=None, metadata=read_while("optim.decay", "wsd"))
    """Steps of the decay of ``wsd``; null = a tenth of the steps up to its end."""
    groups: Mapping[str, GroupConfig] = field(default_factory=dict)
    """Groups of parameters by a label of yours; a parameter may be in one of them."""
    options: Mapping[str, Any] = field(default_factory=dict, metadata=REST)
    """Every other key of the YAML node, checked against the optimizer's ``Config``."""

    def groups_of(self, name: str) -> list[str]:
        """The labels of the groups that a parameter is in."""
        return [
            label
            for label, group in self.groups.items()
            if any(fnmatchcase(name, pattern) for pattern in group.names)
        ]

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter keeps its values."""
        return any(self.groups[label].frozen for label in self.groups_of(name))

    def settings(self, declared: type[Settings]) -> Settings:
        """The options as the optimizer's own ``Config``, once planning has checked them."""
        return read_or_raise(declared, self.options)
