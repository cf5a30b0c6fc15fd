"""The optimizer of every update, gradient clipping, and the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import JobError
from launcher.base.registry import resolve
from launcher.contract.config import LaunchConfig
from launcher.contract.model.shape import ParameterShape
from launcher.contract.optim.config import OptimConfig
from launcher.contract.optim.plugin import optimizer_of
from launcher.runtime.api import GlobalSlice, RankContext

_LARGEST = 2.0**24
LR_FACTOR = "lr_factor"
"""The key of a group of torch's optimizers with `ParameterGroup.lr_factor`."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Tensors that are updated alike."""

    tensors: tuple[Tensor, ...]
    """What is updated: parameters, their fp32 copies, or flat parts of them."""
    slices: tuple[GlobalSlice, ...]
    """Of which parameter each is, in the same order."""
    weight_decay: float
    lr_factor: float = 1.0
    """What the learning rate of a step is multiplied by, with `set_learning_rate`."""

    def torch(self, picks: Callable[[GlobalSlice], bool] = lambda where: True) -> list[dict[str, Any]]:
        """As `torch.optim.Optimizer` takes it, of the tensors whose parameter is picked; none: empty."""
        tensors = [tensor for tensor, where in zip(self.tensors, self.slices, strict=True) if picks(where)]
        settings = {"weight_decay": self.weight_decay, LR_FACTOR: self.lr_factor}
        return [{"params": tensors, **settings}] if tensors else []


def make_optimizer(
    tensors: Iterable[tuple[Tensor, GlobalSlice]], ctx: RankContext
) -> torch.optim.Optimizer | None:
    """The optimizer of some tensors, each with the parameter that it is of. None: there are none.

    Weight decay is for matrices only, as in GPT-3: not for biases and norms, where no group says otherwise.
    """
    alike: dict[tuple[float, float], list[tuple[Tensor, GlobalSlice]]] = {}
    for tensor, where in sorted(tensors, key=lambda pair: len(pair[1].shape) <= 1):
        alike.setdefault(_settings(ctx.config.optim, where), []).append((tensor, where))
    groups = [
        ParameterGroup(
            tensors=tuple(tensor for tensor, _ in members),
            slices=tuple(where for _, where in members),
            weight_decay=weight_decay,
            lr_factor=lr_factor,
        )
        for (weight_decay, lr_factor), members in alike.items()
    ]
    if not groups:
        return None
    make: Callable[..., torch.optim.Optimizer] = resolve(optimizer_of(ctx.config).runtime)
    return make(groups, ctx)


def _settings(optim: OptimConfig, where: GlobalSlice) -> tuple[float, float]:
    """Weight decay and factor of the learning rate of a parameter."""
    decay = optim.weight_decay if len(where.shape) > 1 else 0.0
    for label in optim.groups_of(where.name):
        group = optim.groups[label]
        return decay if group.weight_decay is None else group.weight_decay, group.lr_factor
    return decay, 1.0


def set_learning_rate(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Sets that of a step in the ``param_groups`` of an optimizer."""
    for group in groups:
        group["lr"] = lr * group.get(LR_FACTOR, 1.0)


def state_shapes(
    config: LaunchConfig, where: GlobalSlice, local: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that the optimizer keeps of a parameter, of which a tensor of shape ``local``
    is updated here."""
    optimizer = optimizer_of(config)
    states = optimizer.states(ParameterShape(name=where.name, shape=where.shape), config)
    return {kind: tuple(local) if optimizer.is_elementwise else shape for kind, shape in states.items()}


def state_tensors(
    optimizer: torch.optim.Optimizer | None, tensor: Tensor, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """What an optimizer keeps of a tensor that it updates, and the tensor itself as ``weight``, contiguous;
    zeros before the first update."""
    known = optimizer.state.get(tensor, {}) if optimizer is not None else {}
    states = {kind: known.get(kind) for kind in shapes}
    return {"weight": tensor.detach().contiguous()} | {
        kind: tensor.new_zeros(tuple(shapes[kind])) if state is None else state.contiguous()
        for kind, state in states.items()
    }


def set_state(
    optimizer: torch.optim.Optimizer, tensor: Tensor, states: Mapping[str, Tensor], num_updates: int
) -> None:
    """Gives an optimizer what it keeps of a tensor, after so many updates."""
    step = torch.tensor(float(num_updates), device=tensor.device)
    optimizer.state[tensor] = {"step": step, **states}


class NotFiniteError(JobError):
    """The gradient of a step is infinite or not a number."""

    is_own: bool
    """Whether it is that of one rank alone, whose update does not wait for the others'."""


def not_finite(step: int, norm: float, *, is_own: bool = False) -> NotFiniteError:
    """The error of such a gradient; ``step`` is 0-based, and the message counts from 1, as all that is
    printed. ``is_own``: as `NotFiniteError.is_own`."""
    error = NotFiniteError(f"the gradient of step {step + 1} is not finite ({norm}); try a smaller optim.lr")
    error.is_own = is_own
    return error


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements of some tensors, fp64; from norms in fp32."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.stack(norms).double().square().sum()


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """Factor of a gradient of this norm, as `torch.nn.utils.clip_grad_norm_` has it."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


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
