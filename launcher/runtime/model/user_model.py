"""A user's own model: a list of layers, split over the stages of the pipeline.

``model.target: package.module:build`` names a function. Called with ``model.options`` it returns an
object with

    layers   torch modules, each of which takes the output of the one before, a tensor or a tuple of
             tensors: a sequence, or a generator that makes one at a time
    loss     a function (output, targets) -> scalar: the sum over all elements of ``targets``

The launcher divides the sum by the number of target elements of the global batch. It makes the gradient of
one device from parts of that sum, so a layer has to treat each sample on its own and to do the same whenever
it runs (see `launcher.runtime.model.repeatable`): BatchNorm, dropout and counters are rejected. A layer with
a method ``split_with`` can defer its weight gradients (see
`launcher.runtime.model.deferred_weight_gradients`).

Parameters alone are cast to the compute format: a buffer keeps the format in which it was made, so that a
table of positions stays exact. A module with ``keep_in_fp32 = True`` keeps its parameters in fp32, and those
of the modules in it.

Parameters without ``requires_grad`` keep their values, and have neither gradient nor optimizer state. The
same holds for all up to a layer that passes no gradient on (its forward is under ``no_grad``, say).

``build`` and the generator draw their weights from torch's global generator, which has the run's seed, so
that initial weights are the same under every layout. Every rank first has a whole sequence in memory and
then keeps its own layers; of a generator's layers it holds its own and one more, and where ZeRO shards the
weights, its part of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from launcher.base.errors import ConfigError, Fault
from launcher.base.registry import resolve
from launcher.contract.config import ModelConfig
from launcher.runtime.api import DTYPES, GlobalSlice, RankContext, tag
from launcher.runtime.data.microbatches import Microbatch
from launcher.runtime.model.deferred_weight_gradients import split_with
from launcher.runtime.model.stage import Pack, Stage, Unpack

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A user's model, whose layers come one by one."""

    layers: Iterator[nn.Module]
    loss: Loss


def load_custom(model: ModelConfig, seed: int) -> LoadedModel:
    """The user's whole model on the CPU, with the initial weights of ``seed``.

    Raises:
        ConfigError: when it has no layers or no loss, or a layer whose result depends on the layout. Layers
            of a generator are checked as they are made.
    """
    assert model.target is not None, "a custom model without its target"
    build = resolve(model.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = build(**model.options)
        generator = torch.get_rng_state()
    layers = getattr(built, "layers", ())
    is_sequence = isinstance(layers, Sequence | nn.ModuleList | nn.Sequential)
    is_known = is_sequence or isinstance(layers, Iterator)
    if not is_known or (is_sequence and not len(layers)) or not callable(getattr(built, "loss", None)):
        rule = "must return an object with `layers`, a list or a generator, and a function `loss`"
        fix = "See the documentation of launcher.runtime.model.user_model."
        raise ConfigError([Fault("model.target", model.target, f"{rule}, not {type(built).__name__}", fix)])
    if is_sequence:
        faults = [fault for index, layer in enumerate(layers) for fault in _layer_faults(model, index, layer)]
        if faults:
            raise ConfigError(faults)
    return LoadedModel(layers=_one_by_one(model, iter(layers), generator), loss=built.loss)


def _one_by_one(model: ModelConfig, layers: Iterator[nn.Module], generator: Tensor) -> Iterator[nn.Module]:
    """The layers, each initialised from the generator state that the one before it left."""
    for index in count():
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(generator)
            layer = next(layers, None)
            generator = torch.get_rng_state()
        if layer is None:
            return
        if faults := _layer_faults(model, index, layer):
            raise ConfigError(faults)
        yield layer


def build_custom_chunks(ctx: RankContext) -> list[nn.Module]:
    """The modules of this rank's stages, in chunk order.

    Raises:
        ConfigError: when the layers are not those of the plan, or two stages share a parameter.
    """
    config, stages = ctx.config, ctx.plan.plan.stages
    model = load_custom(config.model, config.seed)
    stage_of = {index: stage.stage for stage in stages for index in stage.layers}
    own: dict[int, list[nn.Module]] = {stage.stage: [] for stage in ctx.plan.stages}
    num_layers = 0
    for index, layer in enumerate(model.layers):
        num_layers += 1
        stage = stage_of.get(index)
        if stage is not None:
            _check_owner(config.model, index, layer, stage)
        if stage in own:
            own[stage].append(_prepared(layer, index, ctx))
    if num_layers != len(stage_of):
        rule = f"gives {num_layers} layers here, the plan was made with {len(stage_of)}"
        fault = Fault("model.target", config.model.target, rule, "Plan again with the same code.")
        raise ConfigError([fault])
    for part in ctx.plan.stages:
        _freeze(own[part.stage], part.num_frozen)
    compute = DTYPES[config.precision.compute]
    prologues = {stages[0].stage: partial(_inputs, compute)}
    epilogues = {stages[-1].stage: partial(_loss_sum, model.loss)}
    for later in stages[1:]:
        if later.input_tensors and later.stage - 1 in own:
            own[later.stage - 1].append(Pack(later.input_tensors, compute))
        if later.input_tensors and later.stage in own:
            own[later.stage].insert(0, Unpack(later.input_tensors, compute))
    return [
        Stage(config, stage, prologues.get(stage.stage), own[stage.stage], epilogues.get(stage.stage))
        for stage in ctx.plan.stages
    ]


def _freeze(layers: Sequence[nn.Module], number: int) -> None:
    """Freezes the first layers of a stage, which no gradient reaches: an update would let weights decay that
    are never trained."""
    reached = {param for layer in layers[number:] for param in layer.parameters()}
    for param in (param for layer in layers[:number] for param in layer.parameters()):
        if param not in reached:  # a layer that is trained may share it
            param.requires_grad_(False)


def _inputs(dtype: torch.dtype, batch: Microbatch) -> Tensor:
    """The samples of a microbatch; real numbers in the compute format."""
    return batch.inputs.to(dtype) if batch.inputs.is_floating_point() else batch.inputs


def _loss_sum(loss: Loss, output: Any, batch: Microbatch) -> Tensor:
    return loss(tree_map(_in_fp32, output), batch.targets)


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _prepared(layer: nn.Module, index: int, ctx: RankContext) -> nn.Module:
    """The layer on the rank's device, sharded where the run shards weights, with every parameter marked as
    unsharded under its global name."""
    cast_parameters(layer, DTYPES[ctx.config.precision.compute])
    layer = layer.to(ctx.device)
    split_with(layer, ctx.split_backward)
    for name, param in layer.named_parameters():
        if hasattr(param, "global_slice"):
            continue  # shared with an earlier layer of the stage
        tag(param, GlobalSlice.unsharded(f"layers.{index}.{name}", param.shape))
    if ctx.partition_weights is not None:
        ctx.partition_weights(layer)
    return layer


def fp32_parameters(layer: nn.Module) -> set[nn.Parameter]:
    """The parameters that the layer asks to keep in fp32."""
    modules = (module for module in layer.modules() if getattr(module, "keep_in_fp32", False))
    return {param for module in modules for param in module.parameters()}


def cast_parameters(layer: nn.Module, compute: torch.dtype) -> None:
    """Casts the layer's parameters to the format in which they are used, in place."""
    kept = fp32_parameters(layer)
    for param in layer.parameters():
        if param.is_floating_point():
            param.data = param.data.to(torch.float32 if param in kept else compute)


def _layer_faults(model: ModelConfig, index: int, layer: nn.Module) -> list[Fault]:
    faults = []
    for name, module in layer.named_modules():
        what = f"layer {index}{f' ({name})' if name else ''} is {type(module).__name__}"
        if isinstance(module, _BatchNorm):
            rule = f"{what}, which mixes the samples of a microbatch: the result would depend on the layout"
            faults.append(Fault("model.target", model.target, rule, "Use GroupNorm or LayerNorm."))
        if isinstance(module, _DropoutNd) and module.p > 0:
            rule = f"{what}({module.p:g}), which draws other numbers on every rank"
            faults.append(Fault("model.target", model.target, rule, "Set its probability to 0."))
    return faults


def _check_owner(model: ModelConfig, index: int, layer: nn.Module, stage: int) -> None:
    """Records the stage of a layer's parameters: copies of one on several stages would silently diverge.

    Raises:
        ConfigError: when another stage has one of them.
    """
    for name, param in layer.named_parameters():
        owner = getattr(param, "owner_stage", stage)
        if owner != stage:
            rule = f"stages {owner} and {stage} share the parameter layers.{index}.{name}"
            fix = "Set parallel.pp=1, or give each layer its own parameters."
            raise ConfigError([Fault("model.target", model.target, rule, fix, ways=({"parallel.pp": 1},))])
        param.owner_stage = stage  # type: ignore[attr-defined]
