"""AdamW as every update uses it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from launcher.config.schema import LaunchConfig
from launcher.errors import JobError


def adamw(params: Iterable[tuple[Tensor, int]], config: LaunchConfig) -> torch.optim.AdamW | None:
    """The optimizer of some tensors, each with the number of dims of the parameter that it belongs to.

    Decay acts on matrices only, as in GPT-3: not on biases and norms. None: there are no parameters.
    """
    tensors, optim, kernels = list(params), config.optim, config.fusion.optimizer
    groups: list[dict[str, Any]] = [
        {"params": [tensor for tensor, dims in tensors if dims > 1], "weight_decay": optim.weight_decay},
        {"params": [tensor for tensor, dims in tensors if dims <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    return torch.optim.AdamW(
        groups,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=kernels == "fused",
        foreach=kernels == "foreach",
    )


def not_finite(step: int, norm: float) -> JobError:
    """What ends a run whose gradient is infinite or not a number."""
    return JobError(f"the gradient of step {step} is not finite ({norm}); try a smaller optim.lr")
