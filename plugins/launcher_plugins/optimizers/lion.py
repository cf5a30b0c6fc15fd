"""Lion: a step of one size for every weight, of which only the sign follows the gradients.

    w <- w - lr (decay w + sign(b1 m + (1 - b1) g))        m <- b2 m + (1 - b2) g

Its learning rate is 3 to 10 times smaller than AdamW's, and its decay as many times larger.

Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.contract.optim.plugin import LaunchConfig, Optimizer, ParameterShape
from launcher.typed.scalars import Probability


@dataclass(frozen=True, kw_only=True)
class LionConfig:
    """Settings of the optimizer."""

    betas: tuple[Probability, Probability] = (0.9, 0.99)
    """Share of the mean in the direction of a step, and decay of the mean, per step."""


class Lion(Optimizer):
    """Lion, one mean per parameter."""

    runtime = "launcher_plugins.optimizers.runtime:lion"
    is_elementwise = True
    Config = LionConfig

    def states(self, parameter: ParameterShape, config: LaunchConfig) -> Mapping[str, tuple[int, ...]]:
        """The mean of the gradients."""
        return {"exp_avg": parameter.shape}

    def scratch_elements(self, kernel: str, whole: int, largest: int) -> int:
        """The direction of one tensor."""
        return largest
