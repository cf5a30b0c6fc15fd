"""Adafactor: of the mean squares of a matrix of gradients only the means of its rows and columns are kept.

    r <- mean squares of the rows, c <- of the columns        v = r c / mean(r)
    w <- w - min(lr, 1 / sqrt(t)) max(eps, rms(w)) g / sqrt(v), no longer than ``clip_threshold``

The learning rate is relative to the size of a tensor's weights: 0.01 is a usual one.

Source: Shazeer and Stern, Adafactor (2018), algorithms 4 and 5; without momentum, as torch has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from launcher.contract.optim.plugin import LaunchConfig, Optimizer, ParameterShape
from launcher.typed.scalars import PositiveFloat, Probability, Range


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig:
    """Settings of the optimizer."""

    decay_exponent: Probability = 0.8
    """How fast the means grow longer: that of step t keeps 1 - t ** -decay_exponent of the last one."""
    eps: PositiveFloat = 1e-3
    """Least size of a tensor's weights by which its step is scaled."""
    clip_threshold: Annotated[float, Range(minimum=1.0)] = 1.0
    """Root mean square above which the update of a tensor is scaled down."""


class Adafactor(Optimizer):
    """Adafactor, of a matrix a number per row and per column."""

    runtime = "launcher_plugins.optimizers.runtime:adafactor"
    kernels = ("foreach", "loop")
    Config = AdafactorConfig

    def states(self, parameter: ParameterShape, config: LaunchConfig) -> Mapping[str, tuple[int, ...]]:
        """The means of rows and columns of the last two dims, or of each element of a vector."""
        *outer, rows, columns = shape if len(shape := parameter.shape) > 1 else (1, 1)
        if len(shape) < 2:
            return {"variance": shape}
        return {"row_var": (*outer, rows, 1), "col_var": (*outer, 1, columns)}

    def scratch_elements(self, kernel: str, whole: int, largest: int) -> int:
        """The estimates of all elements, or of one tensor, and the update made of them."""
        return {"foreach": 2 * whole, "loop": 2 * largest}[kernel]
