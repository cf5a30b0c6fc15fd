"""One stage of a model: consecutive layers, with what makes the first one's input and the loss.

A stage is called as ``stage(hidden, batch)``: the first stage takes its input from the batch and
ignores ``hidden`` (None); the last one returns the sum of the microbatch's losses in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.contract.config import LaunchConfig
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
