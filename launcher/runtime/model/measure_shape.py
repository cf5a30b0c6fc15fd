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

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from launcher.base.errors import ConfigError, Fault, LauncherError
from launcher.base.registry import resolve
from launcher.contract.config import BatchConfig, DataConfig, ModelConfig
from launcher.contract.plan import LayerShape, ModelShape
from launcher.runtime.model.deferred_weight_gradients import SplitBackward, can_split, split_with
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
    shapes = []
    for index, layer in enumerate(load_custom(model, seed=0).layers):
        saved.enter(layer)
        sample = sample.detach()
        if sample.is_floating_point():
            sample.requires_grad_()
        before, deferral = saved.num_elements, SplitBackward(is_enabled=True)
        split_with(layer, deferral)
        with (
            _check_stateless(model, index, layer),
            FlopCounterMode(display=False) as counter,
            saved_tensors_hooks(saved.save, lambda tensor: tensor),
        ):
            sample = layer(sample)
        weight_flops = _weight_flops(layer, sample, deferral) if can_split(layer) else 0.0
        num_parameters = sum(param.numel() for param in layer.parameters())
        shapes.append(
            LayerShape(
                name=f"layers.{index}",
                num_parameters=num_parameters,
                num_replicated_parameters=num_parameters,
                forward_flops=float(counter.get_total_flops()),
                kept_elements=saved.num_elements - before,
                kept_replicated_elements=0,
                output_elements=sample.numel(),
                output_shape=tuple(sample.shape[1:]),
                weight_flops=weight_flops,
            )
        )
    return ModelShape(
        family="custom", layers=tuple(shapes), prologue=None, epilogue=None, num_tied_parameters=0
    )


def _weight_flops(layer: nn.Module, output: Tensor, deferral: SplitBackward) -> float:
    """Operations of the weight gradients that the layer's backward defers."""
    with deferral.collecting() as deferred:
        output.sum().backward()  # type: ignore[no-untyped-call]
    with FlopCounterMode(display=False) as counter:
        for gradient in deferred:
            gradient.compute()
    layer.zero_grad()
    return float(counter.get_total_flops())


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
