"""The shape of a user's own model, measured: each layer runs twice on the CPU with one sample, to be measured
and to be seen to do the same, and beside another sample."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from launcher.base.errors import ConfigError, Fault
from launcher.contract.config import ModelConfig
from launcher.contract.model.shape import LayerShape, ModelShape, ParameterShape
from launcher.runtime.model.deferred_weight_gradients import SplitBackward, split_with
from launcher.runtime.model.repeatable import (
    backward,
    beside,
    detached,
    differences,
    generator_states,
    tensors_of,
)
from launcher.runtime.model.stage import message_elements, message_tensors
from launcher.runtime.model.user_model import cast_parameters, fp32_parameters, load_custom

_OTHER_FORMAT = re.compile(r"same dtype|scalar type|should be the same")
"""In torch's errors for operands of two formats."""


def describe(model: ModelConfig, samples: Tensor, compute: torch.dtype = torch.float32) -> ModelShape:
    """The shape of a user's model, measured with the first of one or two samples [1 or 2, ...].

    ``compute``: the format of the messages between stages.

    Raises:
        ConfigError: with every layer that would not compute under each layout what it does on one device.
    """
    sample, other = samples[:1], cast(Any, samples[1:])
    if len(samples) == 1:  # the same in another order, so that the two differ
        other = sample.roll(1, -1) if sample.dim() > 1 else None
    saved, lookups, given = _SavedElements(), _Lookups(sample), cast(Any, sample)
    single_sample: str | None = None
    shapes: list[LayerShape] = []
    faults: list[Fault] = []
    is_reached, cut_at = False, None
    for index, layer in enumerate(load_custom(model, seed=0).layers):
        leaves = detached(given, requires_grad=is_reached)
        try:
            output, shape, whats = _measured(layer, leaves, saved, lookups, compute)
        except Exception as error:
            what = f"fails on a sample: {type(error).__name__}: {error}"
            raise ConfigError([*faults, _fault(model, index, layer, what)]) from error
        try:
            other, is_mixed = beside(layer, given, output, other)
        except Exception as error:  # of any kind, in the user's code: it may be made for one sample at a time
            what = f"fails on two samples at once: {type(error).__name__}: {error}"
            single_sample, other, is_mixed = f"layer {index} ({type(layer).__name__}) {what}", None, False
        fix = "Take dropout, counters and running statistics out."
        faults += [_fault(model, index, layer, what, fix) for what in whats]
        if is_mixed and not whats:
            what = "gives a sample another result beside other ones, and the layout decides which those are"
            fix = "Let it treat each sample on its own, with the batch as the first dim (batch_first=True)."
            faults.append(_fault(model, index, layer, what, fix))
        shapes.append(replace(shape, name=f"layers.{index}"))
        needs_gradient = any(tensor.requires_grad for tensor in tensors_of(output))
        passes_gradient = any(tensor.grad is not None for tensor in tensors_of(leaves))
        num_cut = 0 if needs_gradient else index + 1
        if needs_gradient and is_reached and not passes_gradient:
            num_cut = index
        if num_cut:
            cut_at = index if is_reached or shape.num_trained_parameters else cut_at
            shapes[:num_cut] = map(_untrained, shapes[:num_cut])
        given, is_reached = output, needs_gradient
    if faults := faults or _format_faults(model, sample, compute):
        raise ConfigError(faults)
    return ModelShape(
        family="custom",
        layers=tuple(shapes),
        prologue=None,
        epilogue=None,
        num_tied_parameters=0,
        num_input_ids=lookups.num_rows,
        cut_at=cut_at,
        single_sample=single_sample,
    )


def _measured(
    layer: nn.Module, given: Any, saved: _SavedElements, lookups: _Lookups, compute: torch.dtype
) -> tuple[Any, LayerShape, list[str]]:
    """The output of a layer, its shape, and why it cannot be trained; gradients of its input are in
    ``given``."""
    layer.train()
    cast_parameters(layer, torch.float32)
    deferral = SplitBackward(is_enabled=True)
    split_with(layer, deferral)
    saved.enter(layer)
    before, generators = saved.num_elements, generator_states()
    with (
        lookups,
        FlopCounterMode(display=False) as counter,
        saved_tensors_hooks(saved.save, lambda tensor: tensor),
    ):
        output = layer(given)
    kept_elements = saved.num_elements - before
    backward_flops, weight_flops = _backward_flops(output, deferral)
    tensors = message_tensors(output)
    size = sum(message_elements(tensor, compute) for tensor in tensors)
    params = list(layer.parameters())
    shape = LayerShape(
        name="",
        num_parameters=sum(param.numel() for param in params),
        num_replicated_parameters=sum(param.numel() for param in params),
        parameters=tuple(
            ParameterShape(name=name, shape=tuple(param.shape), is_trained=param.requires_grad)
            for name, param in layer.named_parameters()
        ),
        num_frozen_parameters=sum(param.numel() for param in params if not param.requires_grad),
        num_fp32_parameters=sum(param.numel() for param in fp32_parameters(layer)),
        forward_flops=float(counter.get_total_flops()),
        backward_flops=backward_flops,
        kept_elements=kept_elements,
        output_elements=size if tensors else output.numel(),
        output_shape=(size,) if tensors else tuple(output.shape[1:]),
        output_tensors=tensors,
        weight_flops=weight_flops,
    )
    differing = list(differences(layer, given, output, generators))
    layer.zero_grad()
    return output, shape, differing


def _format_faults(model: ModelConfig, sample: Tensor, compute: torch.dtype) -> list[Fault]:
    """The first layer that cannot compute with its parameters in the compute format: its buffers keep theirs,
    so that what it adds to its input may be in another one than its parameters."""
    if compute == torch.float32:
        return []
    given: Any = sample.to(compute) if sample.is_floating_point() else sample
    for index, layer in enumerate(load_custom(model, seed=0).layers):
        cast_parameters(layer, compute)
        split_with(layer, SplitBackward(is_enabled=True))
        try:
            with torch.no_grad():
                given = layer(given)
        except RuntimeError as error:
            if not _OTHER_FORMAT.search(str(error)):  # a CPU computes less in such formats than a GPU
                break
            fix = "Cast what it holds to the format of its input, as in x + self.table.to(x.dtype)."
            what = f"mixes formats where parameters are in {str(compute).removeprefix('torch.')}: {error}"
            return [_fault(model, index, layer, what, fix)]
    return []


def _fault(model: ModelConfig, index: int, layer: nn.Module, what: str, fix: str = "") -> Fault:
    return Fault("model.target", model.target, f"layer {index} ({type(layer).__name__}) {what}", fix)


def _untrained(shape: LayerShape) -> LayerShape:
    """The layer where no gradient reaches it."""
    return replace(
        shape,
        parameters=tuple(replace(each, is_trained=False) for each in shape.parameters),
        num_frozen_parameters=shape.num_parameters,
        has_backward=False,
        backward_flops=0.0,
        weight_flops=0.0,
        kept_elements=0,
    )


def _backward_flops(output: Any, deferral: SplitBackward) -> tuple[float, float]:
    """Operations of the layer's backward, and of them those of the weight gradients that it defers."""
    with deferral.collecting() as deferred, FlopCounterMode(display=False) as whole:
        backward(output)
    with FlopCounterMode(display=False) as counter:
        for gradient in deferred:
            gradient.compute()
    weight_flops = float(counter.get_total_flops())
    return float(whole.get_total_flops()) + weight_flops, weight_flops


class _Lookups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how many rows the tables have in which a sample itself is looked up."""

    def __init__(self, sample: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sample = sample.data_ptr(), sample.numel()
        self.num_rows: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default and (args[1].data_ptr(), args[1].numel()) == self._sample:
            self.num_rows = min(self.num_rows or len(args[0]), len(args[0]))
        return func(*args, **(kwargs or {}))


class _SavedElements:
    """Counts what autograd saves: each storage once, parameters not at all."""

    def __init__(self) -> None:
        self.num_elements = 0
        self._parameters: set[int] = set()
        self._known: dict[int, Tensor] = {}
        """By address, which is not reused while the tensor lives."""

    def enter(self, layer: nn.Module) -> None:
        """Counts none of this layer's parameters. Those of the layers before it may be freed, and their
        addresses reused."""
        self._parameters = {param.untyped_storage().data_ptr() for param in layer.parameters()}

    def save(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd saves."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._known and address not in self._parameters:
            self._known[address] = tensor
            self.num_elements += tensor.numel()
        return tensor
