"""What the optimizers run as: torch's own, and Lion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any

import torch
from torch.optim import Optimizer

from launcher.base.errors import JobError
from launcher.contract.optim.plugin import optimizer_of
from launcher.runtime.api import RankContext
from launcher.runtime.train.optimizer import ParameterGroup
from launcher_plugins.optimizers.adafactor import AdafactorConfig
from launcher_plugins.optimizers.adamw import AdamWConfig
from launcher_plugins.optimizers.lion import LionConfig
from launcher_plugins.optimizers.muon import MuonConfig
from launcher_plugins.optimizers.sgd import SGDConfig

Groups = Sequence[ParameterGroup]
_SCALES = {"adamw": "match_rms_adamw", "original": "original"}
"""The scales of Muon's steps by torch's names."""


class _Unshielded(Optimizer):
    """What shields torch's optimizers from torch.compile is left out: to import the compiler for that takes a
    second at the start of every rank."""

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)


class AdamW(_Unshielded, torch.optim.AdamW):
    """torch's."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class SGD(_Unshielded, torch.optim.SGD):
    """torch's."""

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


class Adafactor(_Unshielded, torch.optim.Adafactor):
    """torch's."""

    step = torch.no_grad()(unwrap(torch.optim.Adafactor.step))


def adamw(groups: Groups, ctx: RankContext) -> Optimizer:
    """torch's AdamW."""
    return _adamw(_as_torch(groups), ctx, ctx.config.optim.settings(AdamWConfig), _kernels(ctx))


def sgd(groups: Groups, ctx: RankContext) -> Optimizer:
    """torch's SGD."""
    optim, settings = ctx.config.optim, ctx.config.optim.settings(SGDConfig)
    own: dict[str, Any] = {"momentum": settings.momentum, "nesterov": settings.nesterov}
    return SGD(_as_torch(groups), lr=optim.lr, **own, **_kernels(ctx))


def adafactor(groups: Groups, ctx: RankContext) -> Optimizer:
    """torch's Adafactor."""
    optim, settings = ctx.config.optim, ctx.config.optim.settings(AdafactorConfig)
    return Adafactor(
        _as_torch(groups),
        lr=optim.lr,
        beta2_decay=-settings.decay_exponent,
        eps=(None, settings.eps),
        d=settings.clip_threshold,
        foreach=optimizer_of(ctx.config).kernel(ctx.config) == "foreach",
    )


def lion(groups: Groups, ctx: RankContext) -> Optimizer:
    """Lion, which torch has not."""
    optim = ctx.config.optim
    defaults = {"lr": optim.lr, "betas": optim.settings(LionConfig).betas}
    return Lion(_as_torch(groups), defaults)


def muon(groups: Groups, ctx: RankContext) -> Optimizer:
    """torch's Muon for hidden matrices, and its AdamW for the rest, tensor by tensor.

    Raises:
        JobError: when torch has none.
    """
    optim, settings = ctx.config.optim, ctx.config.optim.settings(MuonConfig)
    if not hasattr(torch.optim, "Muon"):
        raise JobError(f"optim=muon needs torch 2.9 or newer, and this is torch {torch.__version__}")
    hidden = _as_torch(groups, lambda name, shape: settings.takes(name, shape))
    others = _as_torch(groups, lambda name, shape: not settings.takes(name, shape))
    parts: list[Optimizer] = []
    if hidden:
        own: dict[str, Any] = {"momentum": settings.momentum, "nesterov": settings.nesterov}
        own |= {"ns_steps": settings.num_iterations, "adjust_lr_fn": _SCALES[settings.scale]}
        parts.append(torch.optim.Muon(hidden, lr=optim.lr, **own))
    if others:
        parts.append(_adamw(others, ctx, settings, {"fused": False, "foreach": False}))
    return _Parts(parts)


class Lion(_Unshielded):
    """The algorithm of `launcher_plugins.optimizers.lion`, tensor by tensor."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            lr, (share, decay) = group["lr"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(param)
                mean = state["exp_avg"]
                direction = mean.lerp(param.grad, 1 - share).sign_()
                param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                mean.lerp_(param.grad, 1 - decay)


class _Parts(_Unshielded):
    """Several optimizers as one: their groups, and one ``state`` of all tensors."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of each."""
        for part in self._parts:
            part.step()


def _adamw(
    groups: list[dict[str, Any]],
    ctx: RankContext,
    settings: AdamWConfig | MuonConfig,
    kernels: dict[str, bool],
) -> Optimizer:
    return AdamW(groups, lr=ctx.config.optim.lr, betas=settings.betas, eps=settings.eps, **kernels)


def _as_torch(
    groups: Groups, picks: Callable[[str, Sequence[int]], bool] = lambda name, shape: True
) -> list[dict[str, Any]]:
    """The groups as torch takes them, of the parameters that are picked by name and shape."""
    found = (group.torch(lambda where: picks(where.name, where.shape)) for group in groups)
    return [group for part in found for group in part]


def _kernels(ctx: RankContext) -> dict[str, bool]:
    kernel = optimizer_of(ctx.config).kernel(ctx.config)
    return {"fused": kernel == "fused", "foreach": kernel == "foreach"}
