"""A rank's own log: its start, its part of the model, its checkpoints; no line for every step."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.files import naming, share_alike
from launcher.base.timestamps import utc_stamp
from launcher.base.units import counted, format_count
from launcher.contract.plan import RankPlan, StagePlan
from launcher.contract.records import Header

if TYPE_CHECKING:
    from torch import nn


class StampedOutput(io.TextIOWrapper):
    """A text stream that begins every line with the time. What C code writes has none."""

    def __init__(self, descriptor: int) -> None:
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(io.BufferedWriter(raw), "utf-8", "backslashreplace", write_through=True)
        self._begins_line = True

    def write(self, text: str, /) -> int:
        """Writes at once, by a single call for each text: two threads may write."""
        if text:
            stamp = f"{utc_stamp()} "
            lines = text[:-1].replace("\n", f"\n{stamp}") + text[-1]
            super().write(f"{stamp}{lines}" if self._begins_line else lines)
            self._begins_line = text.endswith("\n")
            self.flush()
        return len(text)


def open_log(path: Path) -> None:
    """Sends the output of this process to a file of ``logs/``, which nobody else can read, or the group that
    may read the run directory; its lines begin with the time."""
    path.parent.mkdir(exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    share_alike(path, path.parent.parent)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout.flush()
    sys.stdout, sys.stderr = StampedOutput(1), StampedOutput(2)


def log(text: str) -> None:
    """Writes a line at once, by a single call: two threads may write."""
    with naming(Path("the log of this rank")):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def rank_summary(header: Header, plan: RankPlan, modules: Iterable[nn.Module]) -> str:
    """A rank in a line: its coordinates, its host, and its part of the model."""
    coordinates = f"pp_rank {header.pp_rank}, dp_rank {header.dp_rank}, tp_rank {header.tp_rank}"
    params = {param for module in modules for param in module.parameters()}
    size = sum(getattr(param, "ds_numel", param.numel()) for param in params)  # unsharded under ZeRO-3
    return (
        f"rank {header.rank} of {plan.plan.world_size} on {header.hostname}, {header.device}: {coordinates}; "
        f"{' | '.join(map(_layers, plan.stages))}; {format_count(size)} parameters"
    )


def _layers(stage: StagePlan) -> str:
    """The layers of a stage, such as ``embedding + 2 layers (0-1)``."""
    span = f"{stage.layers[0]}-{stage.layers[-1]}" if stage.num_layers > 1 else f"{stage.first_layer}"
    parts = [f"{counted(stage.num_layers, 'layer')} ({span})"]
    parts = ["embedding", *parts] if stage.has_prologue else parts
    return " + ".join([*parts, "head"] if stage.has_epilogue else parts)
