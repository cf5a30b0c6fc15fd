"""AdamW for every update, its learning rate by step, gradient clipping, and the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from math import cos, pi
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import JobError
from launcher.contract.config import LaunchConfig, OptimConfig

_LARGEST = 2.0**24


class AdamW(torch.optim.AdamW):
    """torch's, without what shields it from torch.compile: to import the compiler for that takes a second
    at the start of every rank."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def adamw(
    params: Iterable[tuple[Tensor, int]], config: LaunchConfig, kind: type[torch.optim.AdamW] = AdamW
) -> torch.optim.AdamW | None:
    """The optimizer of some tensors, each given with the number of dims of its parameter.

    Weight decay is for matrices only, as in GPT-3: not for biases and norms. None: there are no parameters.
    """
    tensors, optim, kernels = list(params), config.optim, config.fusion.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [tensor for tensor, dims in tensors if dims > 1], "weight_decay": optim.weight_decay},
        {"params": [tensor for tensor, dims in tensors if dims <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    return kind(
        groups,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=kernels == "fused",
        foreach=kernels == "foreach",
    )


def not_finite(step: int, norm: float) -> JobError:
    """The error of a run whose gradient is infinite or not a number; ``step`` is 0-based, and the message
    counts from 1, as all that is printed."""
    return JobError(f"the gradient of step {step + 1} is not finite ({norm}); try a smaller optim.lr")


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements of some tensors, fp64; from norms in fp32."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.stack(norms).double().square().sum()


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """Factor of a gradient of this norm, as `torch.nn.utils.clip_grad_norm_` has it."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def learning_rate(optim: OptimConfig, step: int, num_steps: int) -> float:
    """Linear warm-up to ``lr`` at step ``warmup_steps``, then decay to ``lr * min_lr_fraction`` at the last
    of ``decay_steps``, by default of ``num_steps``. ``step`` is 0-based; the first step has
    lr / (warmup_steps + 1), so that none is 0.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / (optim.warmup_steps + 1)
    span = max(1, (optim.decay_steps or num_steps) - 1 - optim.warmup_steps)
    progress = min(1.0, (step - optim.warmup_steps) / span)
    remaining = {"cosine": 0.5 * (1 + cos(pi * progress)), "linear": 1 - progress, "constant": 1.0}
    floor = optim.min_lr_fraction if optim.decay != "constant" else 1.0
    return optim.lr * (floor + (1 - floor) * remaining[optim.decay])


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
    """Steps without overflow before the scale doubles."""
    num_good_steps: int = 0

    @property
    def is_smallest(self) -> bool:
        """Whether it cannot be halved any more."""
        return self.value <= 1.0

    def after_step(self, *, overflowed: bool) -> None:
        """Updates the scale after one step."""
        if overflowed:
            self.value, self.num_good_steps = max(1.0, self.value / 2), 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.value, self.num_good_steps = min(_LARGEST, self.value * 2), 0
