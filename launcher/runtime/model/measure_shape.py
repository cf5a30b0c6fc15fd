"""Measures a user's own model: `python -m launcher.runtime.model.measure_shape < request.json > shape.json`.

The request holds ``model``, ``batch`` and ``data``, as in the configuration. The result is a
`launcher.contract.plan.ModelShape`. Each layer runs once on the CPU with one sample. The planner runs
this in a process of its own, so that it needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from launcher.base.errors import ConfigError, Fault, LauncherError
from launcher.base.registry import resolve
from launcher.contract.config import BatchConfig, DataConfig, ModelConfig
from launcher.contract.plan import LayerShape, ModelShape
from launcher.runtime.model.deferred_weight_gradients import SplitBackward, split_with
from launcher.runtime.model.user_model import load_custom
from launcher.typed.read import plain, read_or_raise


def main() -> int:
    """Measures the model of one request. Returns the exit code."""
    request = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the user's code may print
            model = read_or_raise(ModelConfig, request["model"], "model")
            data = read_or_raise(DataConfig, request["data"], "data")
            sample = first_input(data, read_or_raise(BatchConfig, request["batch"], "batch"))
            shape = describe(model, sample)
    except ConfigError as error:
        print(json.dumps([vars(fault) for fault in error.faults]))
        return 1
    except LauncherError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(plain(shape), allow_nan=False))
    return 0


def first_input(data: DataConfig, batch: BatchConfig) -> Tensor:
    """The input of one sample, as a batch of one.

    Raises:
        ConfigError: when the user's dataset has none.
    """
    if data.target is None:
        return torch.zeros(1, batch.seq_length, dtype=torch.int64)
    try:
        inputs: Tensor = resolve(data.target)(**data.options)[0][0]
        return inputs[None]
    except Exception as error:
        rule = f"its first item could not be read: {type(error).__name__}: {error}"
        raise ConfigError([Fault("data.target", data.target, rule)]) from error


def describe(model: ModelConfig, sample: Tensor) -> ModelShape:
    """The shape of a user's model, measured with one sample [1, ...]."""
    saved = _SavedElements()
    shapes: list[LayerShape] = []
    is_reached, cut_at = False, None
    for index, layer in enumerate(load_custom(model, seed=0).layers):
        given = sample.detach()
        given.requires_grad_(is_reached and given.is_floating_point())
        shape, sample = _measured(model, index, layer, given, saved)
        shapes.append(shape)
        num_cut = 0 if sample.requires_grad else index + 1
        if sample.requires_grad and is_reached and given.grad is None:
            num_cut = index
        if num_cut:
            cut_at = index if is_reached or shape.num_trained_parameters else cut_at
            shapes[:num_cut] = map(_untrained, shapes[:num_cut])
        is_reached = sample.requires_grad
    return ModelShape(
        family="custom",
        layers=tuple(shapes),
        prologue=None,
        epilogue=None,
        num_tied_parameters=0,
        cut_at=cut_at,
    )


def _measured(
    model: ModelConfig, index: int, layer: nn.Module, given: Tensor, saved: _SavedElements
) -> tuple[LayerShape, Tensor]:
    """A layer's shape, and what it makes of its input; the gradient of that is in ``given.grad``."""
    saved.enter(layer)
    before, deferral = saved.num_elements, SplitBackward(is_enabled=True)
    split_with(layer, deferral)
    with (
        _check_stateless(model, index, layer),
        FlopCounterMode(display=False) as counter,
        saved_tensors_hooks(saved.save, lambda tensor: tensor),
    ):
        output: Tensor = layer(given)
    kept_elements = saved.num_elements - before
    backward_flops, weight_flops = _backward_flops(layer, output, deferral)
    params = list(layer.parameters())
    num_parameters = sum(param.numel() for param in params)
    shape = LayerShape(
        name=f"layers.{index}",
        num_parameters=num_parameters,
        num_replicated_parameters=num_parameters,
        num_frozen_parameters=sum(param.numel() for param in params if not param.requires_grad),
        forward_flops=float(counter.get_total_flops()),
        backward_flops=backward_flops,
        weight_flops=weight_flops,
        kept_elements=kept_elements,
        output_elements=output.numel(),
        output_shape=tuple(output.shape[1:]),
    )
    return shape, output


def _untrained(shape: LayerShape) -> LayerShape:
    """The layer where no gradient reaches it."""
    return replace(
        shape,
        num_frozen_parameters=shape.num_parameters,
        has_backward=False,
        backward_flops=0.0,
        weight_flops=0.0,
        kept_elements=0,
    )


def _backward_flops(layer: nn.Module, output: Tensor, deferral: SplitBackward) -> tuple[float, float]:
    """Operations of the layer's backward, and of them those of the weight gradients that it defers."""
    if not output.requires_grad:
        return 0.0, 0.0
    with deferral.collecting() as deferred, FlopCounterMode(display=False) as whole:
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
    with FlopCounterMode(display=False) as counter:
        for gradient in deferred:
            gradient.compute()
    layer.zero_grad()
    weight_flops = float(counter.get_total_flops())
    return float(whole.get_total_flops()) + weight_flops, weight_flops


@contextlib.contextmanager
def _check_stateless(model: ModelConfig, index: int, layer: nn.Module) -> Iterator[None]:
    """Rejects a layer whose forward draws random numbers or changes its buffers: both would differ from rank
    to rank, and the result would depend on the layout.

    Raises:
        ConfigError: naming the layer.
    """
    layer.train()
    generator = torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    yield
    changed = [name for name, buffer in layer.named_buffers() if not torch.equal(buffer, buffers[name])]
    what = "draws random numbers" if not torch.equal(generator, torch.get_rng_state()) else ""
    what = f"changes its buffer {changed[0]}" if changed else what
    if what:
        rule = f"the forward of layer {index} ({type(layer).__name__}) {what}, on every rank its own"
        raise ConfigError(
            [Fault("model.target", model.target, rule, "Take dropout and running statistics out.")]
        )


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


if __name__ == "__main__":
    sys.exit(main())
