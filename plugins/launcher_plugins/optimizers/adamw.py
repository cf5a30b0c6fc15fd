"""AdamW: a step along the mean of the gradients, over the root of the mean of their squares.

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    w <- w - lr (decay w + m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps))

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.contract.optim.plugin import LaunchConfig, Optimizer, ParameterShape
from launcher.typed.scalars import PositiveFloat, Probability

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The means m and v, by torch's names."""


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Settings of the optimizer."""

    betas: tuple[Probability, Probability] = (0.9, 0.95)
    """Decay of the first and of the second moment, per step."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class AdamW(Optimizer):
    """AdamW, two moments per parameter."""

    runtime = "launcher_plugins.optimizers.runtime:adamw"
    is_elementwise = True
    kernels = ("fused", "foreach", "loop")
    Config = AdamWConfig

    def states(self, parameter: ParameterShape, config: LaunchConfig) -> Mapping[str, tuple[int, ...]]:
        """The two moments."""
        return dict.fromkeys(MOMENTS, parameter.shape)

    def scratch_elements(self, kernel: str, whole: int, largest: int) -> int:
        """The denominators of all weights at once (``foreach``), or twice those of one tensor (``loop``)."""
        return {"fused": 0, "foreach": whole, "loop": 2 * largest}[kernel]
