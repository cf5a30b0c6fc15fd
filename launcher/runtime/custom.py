"""A user's own model: a list of layers, split over the stages of the pipeline.

``model.target: package.module:build`` names a function. Called with ``model.options`` it returns an
object with

    layers   a sequence of torch modules; each takes what the one before it gives
    loss     a function (output, targets) -> scalar: the sum over all elements of ``targets``

The launcher divides the sum by the number of target elements of the global batch. It makes the gradient
of one device from parts of that sum, so a layer has to treat each sample on its own and must not draw
random numbers in its forward: BatchNorm and torch's dropout are refused.

The whole list is built in the memory of every rank under the run's seed (so that initial weights are the
same under every layout), then the rank keeps its own layers. ``build`` draws its weights from torch's
global generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from launcher.config.schema import LaunchConfig, ModelConfig
from launcher.errors import ConfigError, Fault
from launcher.plan.model import StagePlan
from launcher.registry import resolve
from launcher.runtime.api import DTYPES, GlobalSlice, RankContext, tag
from launcher.runtime.data import Microbatch
from launcher.runtime.fusion import layer_calls

Loss = Callable[[Tensor, Tensor], Tensor]


class CustomModel(Protocol):
    """What a user's ``build`` returns."""

    layers: Sequence[nn.Module]
    loss: Loss


def load_custom(model: ModelConfig, seed: int) -> CustomModel:
    """The user's whole model on the CPU, with the initial weights of ``seed``.

    Raises:
        ConfigError: when it has no layers or no loss, or a layer that no layout could reproduce.
    """
    assert model.target is not None, "a custom model without its target"
    build = resolve(model.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = build(**model.options)
    layers = list(getattr(built, "layers", ()))
    if not layers or not callable(getattr(built, "loss", None)):
        rule = "must return an object with a list `layers` and a function `loss`"
        fix = "See the documentation of launcher.runtime.custom."
        raise ConfigError([Fault("model.target", model.target, f"{rule}, not {type(built).__name__}", fix)])
    faults = [fault for index, layer in enumerate(layers) for fault in _layer_faults(model, index, layer)]
    if faults:
        raise ConfigError(faults)
    return cast(CustomModel, built)


def build_custom_chunks(ctx: RankContext) -> list[nn.Module]:
    """The modules of this rank's stages, in chunk order.

    Raises:
        ConfigError: when the layers are not those of the plan, or two stages share a parameter.
    """
    config, stages = ctx.config, ctx.plan.plan.stages
    model = load_custom(config.model, config.seed)
    layers = list(model.layers)
    num_planned = stages[-1].layers.stop
    if len(layers) != num_planned:
        rule = f"gives {len(layers)} layers here, the plan was made with {num_planned}"
        fault = Fault("model.target", config.model.target, rule, "Plan again with the same code.")
        raise ConfigError([fault])
    _refuse_sharing(config.model, layers, stages)
    return [_stage(ctx, stage, layers, model.loss) for stage in ctx.plan.stages]


class CustomStage(nn.Module):
    """Consecutive layers of a user's model; called like `launcher.runtime.model.Stage`."""

    def __init__(self, layers: Sequence[nn.Module], config: LaunchConfig, *, is_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.calls = layer_calls(layers, config)
        """What runs in place of each layer while it trains."""
        self.dtype, self.is_first = DTYPES[config.precision.compute], is_first
        self.recomputes = config.parallel.recompute == "full"
        self.loss: Loss | None = None
        """Set on the last stage."""

    def forward(self, hidden: Tensor | None, batch: Microbatch) -> Tensor:
        """hidden [micro, ...] -> [micro, ...], or the fp32 sum of the losses on the last stage."""
        out = self._inputs(batch) if self.is_first else hidden
        assert out is not None, "only the first stage has no input"
        for call in self.calls if torch.is_grad_enabled() else self.layers:
            if self.recomputes and torch.is_grad_enabled():
                out = checkpoint(call, out, use_reentrant=False, preserve_rng_state=False)
            else:
                out = call(out)
        out = cast(Tensor, out)
        return out if self.loss is None else self.loss(out.float(), batch.targets)

    def _inputs(self, batch: Microbatch) -> Tensor:
        return batch.inputs.to(self.dtype) if batch.inputs.is_floating_point() else batch.inputs


def _stage(ctx: RankContext, stage: StagePlan, layers: Sequence[nn.Module], loss: Loss) -> CustomStage:
    dtype = DTYPES[ctx.config.precision.compute]
    own = [_take(layers[index].to(ctx.device, dtype), index) for index in stage.layers]
    module = CustomStage(own, ctx.config, is_first=stage.stage == 0)
    if stage.stage == len(ctx.plan.plan.stages) - 1:
        module.loss = loss
    return module


def _take(layer: nn.Module, index: int) -> nn.Module:
    """The layer with every parameter marked as whole, under its global name."""
    for name, param in layer.named_parameters():
        shape, offset = tuple(param.shape), (0,) * param.dim()
        tag(param, GlobalSlice(name=f"layers.{index}.{name}", shape=shape, offset=offset, is_sharded=False))
    return layer


def _layer_faults(model: ModelConfig, index: int, layer: nn.Module) -> list[Fault]:
    faults = []
    for name, module in layer.named_modules():
        place = f"layer {index}{f' ({name})' if name else ''} is {type(module).__name__}"
        if isinstance(module, _BatchNorm):
            rule = f"{place}, which mixes the samples of a microbatch: the result would depend on the layout"
            faults.append(Fault("model.target", model.target, rule, "Use GroupNorm or LayerNorm."))
        if isinstance(module, _DropoutNd) and module.p > 0:
            rule = f"{place}({module.p:g}), which draws other numbers on every rank"
            faults.append(Fault("model.target", model.target, rule, "Set its p=0."))
    return faults


def _refuse_sharing(model: ModelConfig, layers: Sequence[nn.Module], stages: Sequence[StagePlan]) -> None:
    """Copies of one parameter on several stages would drift apart without a word."""
    owner: dict[nn.Parameter, int] = {}
    for stage in stages:
        for index in stage.layers:
            for name, param in layers[index].named_parameters():
                if owner.setdefault(param, stage.stage) != stage.stage:
                    rule = (
                        f"stages {owner[param]} and {stage.stage} share the parameter layers.{index}.{name}"
                    )
                    fix = "Set parallel.pp=1, or give each layer its own parameters."
                    raise ConfigError([Fault("model.target", model.target, rule, fix)])
