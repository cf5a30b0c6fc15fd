"""What of a model is left to train where ``optim.groups`` keeps parameters as they are.

A layer up to which nothing is trained has no backward, and keeps nothing for it; one that passes a gradient
on without being trained itself computes that gradient alone.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from launcher.contract.model.shape import LayerShape, ModelShape
from launcher.contract.optim.config import OptimConfig


def with_frozen(model: ModelShape, optim: OptimConfig) -> ModelShape:
    """The model without the gradients of frozen parameters."""
    if not any(group.frozen for group in optim.groups.values()):
        return model
    is_reached = False

    def next_part(part: LayerShape | None, prefix: str = "") -> LayerShape | None:
        nonlocal is_reached
        if part is None:
            return None
        frozen = _frozen(part, optim, prefix)
        is_reached = part.has_backward and (is_reached or frozen.num_trained_parameters > 0)
        return frozen if is_reached else _without_backward(frozen)

    prologue = next_part(model.prologue)
    layers = tuple(next_part(layer, f"layers.{index}.") or layer for index, layer in enumerate(model.layers))
    return replace(model, prologue=prologue, layers=layers, epilogue=next_part(model.epilogue))


def _frozen(part: LayerShape, optim: OptimConfig, prefix: str) -> LayerShape:
    """A part whose frozen parameters are not trained."""
    parameters = tuple(
        replace(each, is_trained=each.is_trained and not optim.is_frozen(prefix + each.name))
        for each in part.parameters
    )
    newly = (new for old, new in zip(part.parameters, parameters, strict=True) if old != new)
    number = part.num_frozen_parameters + sum(prod(each.shape) for each in newly)
    found = replace(part, parameters=parameters, num_frozen_parameters=number)
    if found.num_trained_parameters or not part.num_trained_parameters:
        return found
    whole = 2 * part.forward_flops if part.backward_flops is None else part.backward_flops
    return replace(found, backward_flops=whole - part.weight_flops, weight_flops=0.0)


def _without_backward(part: LayerShape) -> LayerShape:
    return replace(
        part,
        has_backward=False,
        backward_flops=0.0,
        weight_flops=0.0,
        kept_elements=0,
        kept_replicated_elements=0,
        kept_gathered_elements=0,
        kept_replicated_bytes=0,
        kept_fp32_elements=0,
        kept_replicated_fp32_elements=0,
        selective=_without_backward(part.selective) if part.selective else None,
    )
