"""The learning rate as a function of the step."""

from __future__ import annotations

from math import cos, pi

from launcher.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, step: int, num_steps: int) -> float:
    """Linear warm-up to ``lr`` at step ``warmup_steps``, then decay to ``lr * min_lr_fraction`` at the
    last step. ``step`` is 0-based; the first step has lr / (warmup_steps + 1), so that none is 0.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / (optim.warmup_steps + 1)
    span = max(1, num_steps - 1 - optim.warmup_steps)
    progress = min(1.0, (step - optim.warmup_steps) / span)
    remaining = {"cosine": 0.5 * (1 + cos(pi * progress)), "linear": 1 - progress, "constant": 1.0}
    floor = optim.min_lr_fraction if optim.decay != "constant" else 1.0
    return optim.lr * (floor + (1 - floor) * remaining[optim.decay])
