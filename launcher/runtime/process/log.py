"""Lines of a rank's own log: where it is, what it has, what it saved; none for every step."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn

from launcher.base.units import counted, format_count
from launcher.contract.plan import RankPlan, StagePlan
from launcher.contract.records import Header


def say(text: str) -> None:
    """Writes a line at once, and in one piece: two threads may write."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def introduction(header: Header, plan: RankPlan, modules: Iterable[nn.Module]) -> str:
    """A rank in a line: its place, its host, and its part of the model."""
    place = f"pp_rank {header.pp_rank}, dp_rank {header.dp_rank}, tp_rank {header.tp_rank}"
    params = {param for module in modules for param in module.parameters()}
    size = sum(getattr(param, "ds_numel", param.numel()) for param in params)  # whole where ZeRO splits it
    return (
        f"rank {header.rank} of {plan.plan.world_size} on {header.hostname}, {header.device}: {place}; "
        f"{' | '.join(map(_part, plan.stages))}; {format_count(size)} parameters"
    )


def _part(stage: StagePlan) -> str:
    """The layers of a stage, such as ``embedding + 2 layers (0-1)``."""
    span = f"{stage.layers[0]}-{stage.layers[-1]}" if stage.num_layers > 1 else f"{stage.first_layer}"
    parts = [f"{counted(stage.num_layers, 'layer')} ({span})"]
    parts = ["embedding", *parts] if stage.has_prologue else parts
    return " + ".join([*parts, "head"] if stage.has_epilogue else parts)
