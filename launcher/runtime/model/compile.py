"""Layers compiled one by one with torch.compile: kernels of their own in place of one for each operation.

A layer is compiled the first time that it trains, forward and backward: within the first step of a start.
Equal layers share what was compiled, ranks of a machine and later runs share it through a folder. Evaluations
run the layers as they are: their graph is another one, and compiling it would count as a later step's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from launcher.contract.config import LaunchConfig

_NUM_VERSIONS = 4
"""Of one layer's code at most: a layer that asks for more is not compiled once for all steps."""


def layer_calls(layers: Sequence[nn.Module], config: LaunchConfig) -> list[Callable[..., Any]]:
    """What is called in place of each layer while it trains: the layer itself, or its compiled form."""
    if config.fusion.compile == "none":
        return list(layers)
    _prepare(len(layers), config)
    return [torch.compile(layer, dynamic=False) for layer in layers]


def _prepare(num_layers: int, config: LaunchConfig) -> None:
    import torch._dynamo.config as dynamo  # heavy, and most runs do without
    import torch._inductor.config as inductor

    # Layers of one class but other sizes are versions of one code. Beyond the limit torch would go on
    # uncompiled, without a word that anybody reads.
    dynamo.recompile_limit = _NUM_VERSIONS * max(2, num_layers)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * dynamo.recompile_limit)
    dynamo.fail_on_recompile_limit_hit = True
    if config.device.kind == "cpu":
        inductor.compile_threads = 1  # in this process, which has one thread; else every rank starts helpers
