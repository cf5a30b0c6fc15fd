"""The settings of the alarms of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from launcher.typed.read import Conditions, read_unless, read_where
from launcher.typed.scalars import PositiveFloat, PositiveInt, Range

SpikeAction = Literal["ignore", "warn", "end", "skip", "rewind"]
Action = Literal["ignore", "warn", "end"]
TAKES_BACK = ("skip", "rewind")
"""Actions that all ranks have to take in the same step."""
Window = Annotated[int, Range(minimum=2, maximum=10_000)]
"""Number of steps that a figure is computed from."""
_COMPARED = read_where(
    "a pipeline stage has several ranks",
    lambda dp, tp: dp * tp > 1,
    "parallel.dp",
    "parallel.tp",
    neutral="ignore",
)


def _acts(action: str) -> Conditions:
    """Read where one of the alarms of the loss does this."""
    text = f"alarms.spike or alarms.not_finite is {action}"
    return read_where(text, lambda *actions: action in actions, "alarms.spike", "alarms.not_finite")


@dataclass(frozen=True, kw_only=True)
class AlarmsConfig:
    """What is watched in a training, and what follows: ``ignore``; ``warn``: an event is written; ``end``: it
    is, and the run fails; ``skip``: no update is made from the batch; ``rewind``: the training goes back to
    the newest intact checkpoint, and passes over all batches from there to the one that raised the alarm."""

    spike: SpikeAction = "warn"
    """A loss above the mean plus ``spike_deviations`` standard deviations of the latest ones."""
    spike_deviations: PositiveFloat = field(default=8.0, metadata=read_unless("alarms.spike", "ignore"))
    """Standard deviations above the mean; each counts as at least 0.1 % of the mean."""
    spike_window: Window = field(default=100, metadata=read_unless("alarms.spike", "ignore"))
    """Steps whose losses mean and deviation are of, the latest that were updated from; before there are as
    many no loss is a spike."""
    not_finite: Literal["end", "skip", "rewind"] = "end"
    """A loss or gradient that is infinite or not a number: no update can be made from it. With fp16 only at
    the smallest loss scale."""
    max_skips: PositiveInt = field(default=10, metadata=_acts("skip"))
    """Batches in a row that may be skipped; at one more the run fails."""
    max_rewinds: PositiveInt = field(default=3, metadata=_acts("rewind"))
    """Times that a run may go back to a checkpoint, over all of its starts; at one more it fails."""
    slow_step: Action = "warn"
    """A step of at least 1 s that takes more than ``slow_step_factor`` times the median of the latest ones,
    evaluation and checkpoint left out."""
    slow_step_factor: PositiveFloat = field(default=10.0, metadata=read_unless("alarms.slow_step", "ignore"))
    """Multiple of the median."""
    slow_step_window: Window = field(default=50, metadata=read_unless("alarms.slow_step", "ignore"))
    """Steps that the median is of; before there are as many no step is slow."""
    slow_rank: Action = field(default="warn", metadata=_COMPARED)
    """A rank that computes for more than ``slow_rank_factor`` times the median of the other ranks of its
    pipeline stage. Not watched among replicas that exchange no times, each of which steps on its own."""
    slow_rank_factor: PositiveFloat = field(default=1.5, metadata=read_unless("alarms.slow_rank", "ignore"))
    """Multiple of the median."""
    slow_rank_window: Window = field(default=100, metadata=read_unless("alarms.slow_rank", "ignore"))
    """Steps over which the times are summed, and after which the ranks exchange them."""
    no_progress: Action = "warn"
    """No step is done for ``no_progress_s``, though the ranks give signs of life."""
    no_progress_s: PositiveFloat | None = field(
        default=None, metadata=read_unless("alarms.no_progress", "ignore")
    )
    """Seconds without a step, evaluation and checkpoint included; null = half of ``run.timeout_s``."""

    @property
    def takes_back(self) -> tuple[str, ...]:
        """The alarms that leave out an update or go back, by the name of their setting."""
        return tuple(name for name in ("spike", "not_finite") if getattr(self, name) in TAKES_BACK)
