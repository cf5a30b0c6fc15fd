"""Dynamic loss scaling: keeps fp16 gradients between underflow and overflow."""

from __future__ import annotations

from dataclasses import dataclass

_LARGEST = 2.0**24


@dataclass
class LossScale:
    """Halves when a gradient overflowed, doubles after enough steps without.

    Source: Micikevicius et al., Mixed Precision Training (2018), section 3.2.

    >>> scale = LossScale(value=1024.0, growth_interval=2)
    >>> scale.after_step(overflowed=True), scale.value
    (None, 512.0)
    >>> scale.after_step(overflowed=False), scale.after_step(overflowed=False), scale.value
    (None, None, 1024.0)
    """

    value: float = 2.0**16
    growth_interval: int = 1000
    """Steps without overflow until the scale doubles."""
    num_good_steps: int = 0

    def after_step(self, *, overflowed: bool) -> None:
        """Takes note of one step."""
        if overflowed:
            self.value, self.num_good_steps = max(1.0, self.value / 2), 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.value, self.num_good_steps = min(_LARGEST, self.value * 2), 0
