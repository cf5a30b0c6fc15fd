"""Alarms of the loss and the gradient, and what follows: the same on all ranks in the same step.

Where a batch may be skipped or the training may go back, every rank has to know the loss before the update.
The ranks of the last pipeline stage do; where a replica has more than one rank, they tell the others by one
sum of a number over the replica. Every other action is taken by the ranks that know the loss anyway, without
any message: they write it down, or fail.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
import torch.distributed as dist

from launcher.base.errors import JobError
from launcher.base.units import counted
from launcher.contract.alarms.events import Event, now
from launcher.runtime.api import FragmentReader, GlobalFragment, GlobalSlice, RankContext, StepOutcome
from launcher.runtime.checkpoint.fragments import scalar_fragment
from launcher.runtime.train.optimizer import NotFiniteError, not_finite

NUM_LOSSES, LOSSES = "alarms/num_losses", "alarms/losses"
"""Names in a checkpoint: a run that is resumed judges its losses as if it had gone on."""
_LEAST_DEVIATION = 1e-3
"""Share of the mean that a deviation counts as at least: losses that hardly vary are no reason for alarms."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """What is wrong with a step."""

    kind: str
    action: str
    text: str
    figures: Mapping[str, float | None] = field(default_factory=dict)


def spike_limit(losses: Sequence[float], deviations: float) -> tuple[float, float]:
    """Mean of some losses, and the largest loss that is no spike after them.

    >>> spike_limit([1.0, 3.0], 2.0)
    (2.0, 4.0)
    """
    mean = math.fsum(losses) / len(losses)
    deviation = math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / len(losses))
    return mean, mean + deviations * max(deviation, _LEAST_DEVIATION * abs(mean))


class LossAlarms:
    """Judges the loss and the gradient of each step on this rank."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx, self._settings = ctx, ctx.config.alarms
        self.decides_first = bool(self._settings.takes_back)
        """Whether all ranks judge a step before its update."""
        coordinates = ctx.plan.coordinates
        assert coordinates is not None, "a rank that does not train has no loss"
        is_last = any(stage.stage == len(ctx.plan.plan.stages) - 1 for stage in ctx.plan.stages)
        self._tells = is_last and coordinates.tp == 0
        self.is_first = self._tells and coordinates.dp == 0
        """Whether this is the one rank of the run that writes down what happens."""
        self._losses: deque[float] = deque(maxlen=self._settings.spike_window)
        self._deviations, self._max_skips = self._settings.spike_deviations, self._settings.max_skips
        self._num_skipped = 0
        """Batches skipped in a row."""
        self.write: Callable[[Event], None] = lambda event: None
        self.write_own: Callable[[Event], None] = lambda event: None
        """The same for what concerns this rank alone, whichever it is."""

    def agree(self, loss: float | None) -> float | None:
        """The loss on all ranks of a replica, where they have to know it. Collective over them."""
        group = self._ctx.groups.model
        if group.size == 1:
            return loss
        value = torch.tensor(loss if self._tells else 0.0, dtype=torch.float64, device=self._ctx.device)
        with self._ctx.clock.section("model"):
            dist.all_reduce(value, group=group.handle)
        return float(value)

    def judge(self, step: int, loss: float | None, outcome: StepOutcome | None = None) -> Alarm | None:
        """What is wrong with a step, by its loss (None: not known here) and, after it, by its update."""
        if outcome is not None and not outcome.is_finite:
            error = str(not_finite(step, outcome.grad_norm))
            return self._alarm("not_finite", error, {"loss": loss, "grad_norm": outcome.grad_norm})
        if loss is None:
            return None
        if not math.isfinite(loss):
            error = f"the loss of step {step + 1} is not finite ({loss}); try a smaller optim.lr"
            return self._alarm("not_finite", error, {"loss": loss})
        if self._settings.spike == "ignore" or len(self._losses) < self._settings.spike_window:
            return None
        mean, limit = spike_limit(self._losses, self._deviations)
        if loss <= limit:
            return None
        error = (
            f"the loss of step {step + 1} is {loss:.4g}, above {limit:.4g}, which is the mean {mean:.4g} of "
            f"the last {len(self._losses)} and {self._deviations:g} deviations (alarms.spike)"
        )
        return self._alarm("spike", error, {"loss": loss, "mean": mean, "limit": limit})

    def _alarm(self, kind: str, text: str, figures: Mapping[str, float | None]) -> Alarm:
        known = {name: _or_none(value) for name, value in figures.items()}
        return Alarm(kind=kind, action=getattr(self._settings, kind), text=text, figures=known)

    def act(self, step: int, alarm: Alarm) -> None:
        """Writes down an alarm, and ends the rank where the run is set so. Going back is the loop's.

        Raises:
            JobError: where the run fails.
        """
        if alarm.action == "rewind":
            return
        if alarm.action == "skip":
            self._num_skipped += 1
            if self._num_skipped <= self._max_skips:
                self.note(step, alarm, "its batch is skipped: no update was made from it")
                return
            before = counted(self._max_skips, "batch")
            self.fail(step, alarm, f"{before} before it were skipped (alarms.max_skips)")
        if alarm.action == "end":
            self.fail(step, alarm)
        self.note(step, alarm, "the training goes on")

    def note(self, step: int, alarm: Alarm, done: str) -> None:
        """Writes down an alarm."""
        self.write(Event(time=now(), kind=alarm.kind, step=step + 1, figures=alarm.figures, done=done))

    def tell_of_gradient(self, step: int, error: NotFiniteError) -> None:
        """Writes down that this rank fails by a gradient: its own, or the one that all have together."""
        event = Event(time=now(), kind="not_finite", step=step + 1, figures={"grad_norm": None})
        if error.is_own:
            rank, node = self._ctx.plan.rank, socket.gethostname()
            self.write_own(replace(event, rank=rank, node=node, done="this rank fails"))
        else:
            self.write(replace(event, done="the run fails"))

    def fail(self, step: int, alarm: Alarm, why: str = "") -> NoReturn:
        """Writes down that the run fails, and fails.

        Raises:
            JobError: always.
        """
        self.note(step, alarm, f"the run fails{f': {why}' if why else ''}")
        raise JobError(f"{alarm.text}; {why}" if why else alarm.text)

    def took(self, loss: float | None) -> None:
        """Notes that an update was made from a batch with this loss."""
        self._num_skipped = 0
        if self._settings.spike != "ignore" and loss is not None and math.isfinite(loss):
            self._losses.append(loss)

    def state(self) -> Iterator[GlobalFragment]:
        """The losses that later ones are compared with, from one rank."""
        if self.is_first and self._losses:
            yield scalar_fragment(NUM_LOSSES, len(self._losses))
            losses = torch.tensor(list(self._losses), dtype=torch.float64)
            yield GlobalFragment(slice=GlobalSlice.unsharded(LOSSES, losses.shape), tensor=losses)

    def load(self, read: FragmentReader) -> None:
        """Restores what `state` returned; nothing where a checkpoint holds no losses, as those of earlier
        versions and those that ranks of another role save."""
        self._losses.clear()
        self._num_skipped = 0
        try:
            number = int(read(NUM_LOSSES, (), ()))
        except JobError:
            return
        self._losses.extend(read(LOSSES, (0,), (number,)).tolist())


def _or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
