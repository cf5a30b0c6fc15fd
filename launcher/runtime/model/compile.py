"""Layers compiled one by one with torch.compile, which fuses operations into fewer kernels.

A layer is compiled the first time that it trains, forward and backward: within the first step after a start.
Equal layers share their compiled code, ranks of a machine and later runs share it through a folder.
Evaluations run the layers uncompiled: their graph is another one, and compiling it would count as a later
step's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from launcher.contract.config import LaunchConfig

_NUM_VERSIONS = 4
"""Most compiled versions of one layer's code: a layer that needs more is recompiled again and again."""


def layer_calls(layers: Sequence[nn.Module], config: LaunchConfig) -> list[Callable[..., Any]]:
    """What is called in place of each layer while it trains: the layer itself, or its compiled form."""
    if config.fusion.compile == "none":
        return list(layers)
    _configure(len(layers), config)
    return [
        layer if getattr(layer, "is_left_uncompiled", False) else torch.compile(layer, dynamic=False)
        for layer in layers
    ]


def _configure(num_layers: int, config: LaunchConfig) -> None:
    import torch._dynamo.config as dynamo  # slow to import, and most runs need neither
    import torch._inductor.config as inductor

    # Layers of one class but different sizes are versions of one code. Beyond the limit torch would run
    # uncompiled, with no more than a warning.
    dynamo.recompile_limit = _NUM_VERSIONS * max(2, num_layers)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * dynamo.recompile_limit)
    dynamo.fail_on_recompile_limit_hit = True
    if config.device.kind == "cpu":
        inductor.compile_threads = 1  # in this process: else every rank would start compile processes
