"""One stage of a model: consecutive layers, with what makes the first one's input and the loss.

A stage is called as ``stage(hidden, batch)``: the first stage takes its input from the batch and
ignores ``hidden`` (None); the last one returns the sum of the microbatch's losses in fp32.

Between stages is one tensor [micro, ...] in the compute format. Where the layer before gives several tensors,
or one without gradients such as a mask, the stages end with `Pack` and begin with `Unpack`:

    x [micro, 8, 32] fp32, mask [micro, 8] int64  ->  [micro, 8 * 32 + 8 * 2] fp32  ->  x, mask
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launcher.base.errors import JobError
from launcher.contract.config import LaunchConfig
from launcher.contract.model.shape import TensorShape
from launcher.contract.plan import StagePlan
from launcher.runtime.data.microbatches import Microbatch
from launcher.runtime.model.blocks import Block
from launcher.runtime.model.compile import layer_calls


class Stage(nn.Module):
    """Consecutive layers: blocks of a transformer, or a user's own."""

    def __init__(
        self,
        config: LaunchConfig,
        stage: StagePlan,
        prologue: Callable[[Microbatch], Tensor] | None,
        blocks: Sequence[nn.Module],
        epilogue: Callable[[Tensor, Microbatch], Tensor] | None,
    ) -> None:
        """``prologue``: makes the first layer's input, on the first stage; ``epilogue``: the loss of the
        last layer's output, on the last."""
        super().__init__()
        self.prologue = prologue
        self.blocks = nn.ModuleList(blocks)
        self.epilogue = epilogue
        self.calls = layer_calls(blocks, config)
        """What runs in place of each layer in training; not a module, so that its parameters count once."""
        self.recomputes = stage.recompute == "full"

    def forward(self, hidden: Tensor | None, batch: Microbatch) -> Tensor:
        """hidden [micro, ...] -> [micro, ...], or a scalar on the last stage."""
        if self.prologue is not None:
            hidden = self.prologue(batch)
        assert hidden is not None, "only the first stage has no input"
        trains = torch.is_grad_enabled()
        calls: Iterable[Callable[..., Any]] = self.calls if trains else self.blocks
        for layer, call in zip(self.blocks, calls, strict=True):
            if self.recomputes and trains:
                run = partial(_run, layer, call, batch)
                # Dropout depends on positions only, so there is no generator state to restore.
                hidden = cast(Tensor, checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False))
            else:
                hidden = _run(layer, call, batch, hidden)
        return hidden if self.epilogue is None else self.epilogue(hidden, batch)


def _run(layer: nn.Module, call: Callable[..., Any], batch: Microbatch, hidden: Tensor) -> Tensor:
    """``call``, which stands for a layer, with the seeds of its dropouts."""
    seeds = layer.seeds(batch) if isinstance(layer, Block) else ()
    return cast(Tensor, call(hidden, *seeds))


def message_tensors(output: Any) -> tuple[TensorShape, ...]:
    """What one sample's output of a user's layer consists of; empty where it is a message as it is.

    Raises:
        TypeError: when it is neither a tensor nor a tuple of tensors.
    """
    tensors = output if type(output) is tuple and len(output) > 1 else (output,)
    if not all(isinstance(tensor, Tensor) and not tensor.is_complex() for tensor in tensors):
        names = ", ".join(type(tensor).__name__ for tensor in tensors)
        rule = "a layer returns a tensor of real or whole numbers, or a tuple of two or more"
        raise TypeError(f"{rule}, not {names}")
    if len(tensors) == 1 and output.is_floating_point():
        return ()
    return tuple(map(_tensor_shape, tensors))


def message_elements(tensor: TensorShape, compute: torch.dtype) -> int:
    """Elements of the compute format that hold one sample's part of a tensor.

    >>> message_elements(TensorShape(shape=(5,), dtype="bool"), torch.float32)
    2
    """
    if tensor.dtype is None:
        return prod(tensor.shape)
    return -(-prod(tensor.shape) * _dtype(tensor, compute).itemsize // compute.itemsize)


class Pack(nn.Module):
    """Tensors -> one message [micro, elements], of which each sample has a row."""

    is_left_uncompiled = True
    """Compiled code may change bits that are no numbers of the compute format."""

    def __init__(self, tensors: Sequence[TensorShape], compute: torch.dtype) -> None:
        super().__init__()
        self._tensors, self._compute = tensors, compute

    def forward(self, given: Any) -> Tensor:
        """The tensors in the compute format as they are, the others bit by bit.

        Raises:
            JobError: when they are not as planned.
        """
        found = given if isinstance(given, tuple) else (given,)
        parts = [self._rows(tensor, planned) for tensor, planned in zip(found, self._tensors, strict=True)]
        num_samples = max(map(len, parts))
        return torch.cat([rows.expand(num_samples, -1) for rows in parts], 1)

    def _rows(self, tensor: Tensor, planned: TensorShape) -> Tensor:
        """A row for each sample, or one for all."""
        shape = tensor.shape if planned.is_shared else tensor.shape[1:]
        dtype = _dtype(planned, self._compute)
        if (tuple(shape), tensor.dtype) != (planned.shape, dtype):
            raise JobError(
                f"a layer gives {tuple(tensor.shape)} {tensor.dtype} to the next stage, planned is "
                f"{planned.shape} {dtype} for a sample: each step must give the planned shapes and formats"
            )
        rows = tensor.reshape(1 if planned.is_shared else len(tensor), -1)
        if planned.dtype is None:
            return rows
        bits = rows.contiguous().view(torch.uint8)
        return functional.pad(bits, (0, -bits.shape[1] % self._compute.itemsize)).view(self._compute)


class Unpack(nn.Module):
    """One message [micro, elements] -> the tensors that `Pack` was given."""

    is_left_uncompiled = True
    """Compiled code may change bits that are no numbers of the compute format."""

    def __init__(self, tensors: Sequence[TensorShape], compute: torch.dtype) -> None:
        super().__init__()
        self._tensors, self._compute = tensors, compute

    def forward(self, message: Tensor) -> Any:
        """The tensors; a single one as it is."""
        parts = torch.split(message, [message_elements(tensor, self._compute) for tensor in self._tensors], 1)
        tensors = tuple(map(self._tensor, parts, self._tensors))
        return tensors if len(tensors) > 1 else tensors[0]

    def _tensor(self, rows: Tensor, planned: TensorShape) -> Tensor:
        rows = rows[:1] if planned.is_shared else rows
        shape = planned.shape if planned.is_shared else (len(rows), *planned.shape)
        if planned.dtype is None:
            return rows.reshape(shape)
        dtype = _dtype(planned, self._compute)
        bits = rows.detach().contiguous().view(torch.uint8)
        return bits[:, : prod(planned.shape) * dtype.itemsize].contiguous().view(dtype).view(shape)


def _tensor_shape(tensor: Tensor) -> TensorShape:
    """Of a tensor of one sample."""
    is_shared = tensor.dim() == 0 or len(tensor) != 1
    dtype = None if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return TensorShape(shape=tuple(tensor.shape[0 if is_shared else 1 :]), dtype=dtype, is_shared=is_shared)


def _dtype(tensor: TensorShape, compute: torch.dtype) -> torch.dtype:
    return compute if tensor.dtype is None else cast(torch.dtype, getattr(torch, tensor.dtype))
