"""The learning rate of every step.

cosine, linear   /‾‾\\__      falls from the end of the warm-up to the end of the decay
wsd              /‾‾‾‾‾‾\\     stays, and falls linearly in the last ``cooldown_steps``
inverse_sqrt     /\\___        falls as 1 / sqrt(step), whatever the number of steps
constant         /‾‾‾‾‾‾‾
"""

from __future__ import annotations

from math import cos, pi, sqrt

from launcher.contract.optim.config import OptimConfig


def learning_rate(optim: OptimConfig, step: int, num_steps: int) -> float:
    """Linear warm-up to ``lr`` at step ``warmup_steps``, then decay to ``lr * min_lr_fraction`` at the last
    of ``decay_steps``, by default of ``num_steps``. ``step`` is 0-based; the first step has
    lr / (warmup_steps + 1), so that none is 0.

    Source: Loshchilov and Hutter, SGDR (2017), of the cosine; Hu et al., MiniCPM (2024), section 4, of wsd;
    Vaswani et al., Attention Is All You Need (2017), equation 3, of the inverse root.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / (optim.warmup_steps + 1)
    if optim.decay == "constant":
        return optim.lr
    floor, last = optim.min_lr_fraction, (optim.decay_steps or num_steps) - 1
    if optim.decay == "inverse_sqrt":
        made = min(step, last if optim.decay_steps else step) + 1
        return optim.lr * max(floor, sqrt((optim.warmup_steps + 1) / max(made, optim.warmup_steps + 1)))
    first = optim.warmup_steps
    if optim.decay == "wsd":
        first = max(first, last - cooldown_steps(optim, num_steps))
    progress = min(1.0, max(0, step - first) / max(1, last - first))
    remaining = 0.5 * (1 + cos(pi * progress)) if optim.decay == "cosine" else 1 - progress
    return optim.lr * (floor + (1 - floor) * remaining)


def cooldown_steps(optim: OptimConfig, num_steps: int) -> int:
    """Steps in which the learning rate of ``wsd`` falls."""
    return optim.cooldown_steps or max(1, (optim.decay_steps or num_steps) // 10)
