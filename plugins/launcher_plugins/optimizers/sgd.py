"""SGD with momentum: a step along the sum of the gradients, in which older ones count less.

    g <- g + decay w        b <- momentum b + g        w <- w - lr b, or lr (g + momentum b) with nesterov

Source: Sutskever et al., On the Importance of Initialization and Momentum in Deep Learning (2013), as torch
has it: the learning rate is outside of the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from launcher.contract.optim.plugin import Fault, LaunchConfig, ModelShape, Optimizer, ParameterShape
from launcher.typed.scalars import Probability


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Settings of the optimizer, which adds ``optim.weight_decay`` to the gradient, as a penalty of the
    loss."""

    momentum: Probability = 0.9
    """What is left of the sum of the gradients after each step; 0 = no sum is kept."""
    nesterov: bool = False
    """Whether a step looks ahead along the sum."""


class SGD(Optimizer):
    """SGD with momentum, one sum per parameter."""

    runtime = "launcher_plugins.optimizers.runtime:sgd"
    is_elementwise = True
    kernels = ("fused", "foreach", "loop")
    Config = SGDConfig

    def states(self, parameter: ParameterShape, config: LaunchConfig) -> Mapping[str, tuple[int, ...]]:
        """The sum of the gradients, where there is one."""
        has_sum = config.optim.settings(SGDConfig).momentum > 0
        return {"momentum_buffer": parameter.shape} if has_sum else {}

    def check(self, config: LaunchConfig, model: ModelShape) -> Iterable[Fault]:
        """Nesterov's step is one along a sum."""
        settings = config.optim.settings(SGDConfig)
        if settings.nesterov and not settings.momentum:
            rule = "looks ahead along the sum of the gradients, and optim.momentum=0 keeps none"
            ways = ({"optim.momentum": 0.9}, {"optim.nesterov": False})
            yield Fault("optim.nesterov", "true", rule, ways=ways)

    def scratch_elements(self, kernel: str, whole: int, largest: int) -> int:
        """Gradients with the decay added, and with nesterov the sum beside them."""
        return {"fused": 0, "foreach": whole, "loop": 2 * largest}[kernel]
