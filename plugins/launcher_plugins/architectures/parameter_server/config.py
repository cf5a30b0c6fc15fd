"""The settings of parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from launcher.contract.config import LaunchConfig
from launcher.typed.scalars import NonNegativeInt, PositiveFloat, Range, SmallInt

NAME = "parameter_server"
"""Name of the plugin."""
SERVER = "server"
"""Role of the ranks that hold the parameters."""
PATH = "architecture"
"""Config path of the settings."""


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig:
    """Settings of the architecture."""

    mode: Literal["sync", "async", "bounded"] = "sync"
    """When a server updates: ``sync`` once a step, with every worker's gradient; ``async`` with each
    gradient as it comes; ``bounded`` likewise, but holds back workers that are too far ahead."""
    servers: SmallInt = 1
    """Ranks that hold the parameters, beside the parallel.dp workers."""
    staleness: NonNegativeInt | None = None
    """Steps that a worker may be ahead of the slowest (``bounded``); 0 is ``sync``."""
    lr_scale: PositiveFloat | None = None
    """Factor of the learning rate where each worker's gradient is an update of its own; null = 1 over the
    number of workers."""
    overlap: bool = True
    """Push during the backward and pull during the forward, not after the one and before the other."""
    compression: Literal["none", "bf16", "top_k"] = "none"
    """What is pushed: all gradients; rounded to bf16; the largest alone. What is left out is added to the
    next step's (error feedback)."""
    top_k_fraction: Annotated[float, Range(above=0, maximum=1)] | None = None
    """Share of the gradients that ``top_k`` pushes."""
    on_worker_loss: Literal["fail", "continue"] | None = None
    """Whether the run fails when a worker is gone, or goes on with the others; null = ``fail`` in lock-step,
    else ``continue``."""

    @property
    def is_lockstep(self) -> bool:
        """Whether there is one update a step, with the sum over all workers."""
        return self.mode == "sync" or (self.mode == "bounded" and self.staleness == 0)

    @property
    def goes_on(self) -> bool:
        """Whether the run outlives a worker."""
        default = "fail" if self.is_lockstep else "continue"
        return (self.on_worker_loss or default) == "continue"

    def lr_factor(self, num_workers: int) -> float:
        """What the learning rate is multiplied by."""
        if self.is_lockstep:
            return 1.0
        return 1 / num_workers if self.lr_scale is None else self.lr_scale


def settings_of(config: LaunchConfig) -> ParameterServerConfig:
    """The settings of the architecture, which planning has checked."""
    return config.architecture.settings(ParameterServerConfig)
