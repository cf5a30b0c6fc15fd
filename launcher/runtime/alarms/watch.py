"""All that a rank watches in its training loop, and the way back to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from launcher.base.units import counted
from launcher.contract.alarms.events import Event, append
from launcher.contract.alarms.rewinds import Rewinds, read_rewinds, write_rewinds
from launcher.contract.job import CHECKPOINTS
from launcher.runtime.alarms.losses import Alarm, LossAlarms
from launcher.runtime.alarms.speed import ProgressWatch, SpeedAlarms
from launcher.runtime.api import RankContext, Stateful
from launcher.runtime.checkpoint.saving import Saver, restore
from launcher.runtime.process.log import log


class Watch:
    """The alarms of one rank of a run."""

    def __init__(self, ctx: RankContext, losses: LossAlarms, run_dir: Path) -> None:
        """``losses``: from now on writes its events into the run directory, on the one rank that does."""
        self._ctx, self._losses, self._run_dir = ctx, losses, run_dir
        self._max_rewinds = ctx.config.alarms.max_rewinds
        self.rewinds: Rewinds = read_rewinds(run_dir)
        """Times that the run went back, and so which batch each step takes."""
        losses.write_own = partial(_append, run_dir)
        if losses.is_first:
            losses.write = losses.write_own
        self._speed = SpeedAlarms(ctx, losses.write, is_first=losses.is_first)
        self._progress: ProgressWatch | None = None
        if losses.is_first and ctx.config.alarms.no_progress != "ignore":
            self._progress = ProgressWatch(ctx, run_dir, losses.write)

    def after(self, step: int, times: Mapping[str, Any]) -> None:
        """Takes in that a step is done. Collective over all ranks, but seldom a message.

        Raises:
            JobError: where the run is set to fail.
        """
        if self._progress is not None:
            self._progress.done(step + 1)
        self._speed.after(step, times)

    def rewind(self, step: int, alarm: Alarm, saver: Saver, state: Stateful) -> int:
        """Goes back to the newest intact checkpoint after an alarm in ``step``. Collective over all ranks.

        Returns the first step that is made again, with the batch behind the one of ``step``.

        Raises:
            JobError: when the run has gone back too often, or there is no checkpoint.
        """
        if len(self.rewinds.rewinds) >= self._max_rewinds:
            times = counted(self._max_rewinds, "time")
            self._losses.fail(step, alarm, f"it has gone back {times} (alarms.max_rewinds)")
        saver.wait()
        root = self._run_dir / CHECKPOINTS
        if not any(root.glob("step-*")):
            self._losses.fail(step, alarm, "there is no checkpoint yet to go back to")
        first = restore(self._ctx, state, root)
        self.rewinds = self.rewinds.rewound(step, first)
        if self._ctx.plan.rank == 0:
            write_rewinds(self._run_dir, self.rewinds)
        passed = counted(self.rewinds.rewinds[-1].num_passed, "batch")
        done = f"back to the checkpoint after step {first}, from where on {passed} are passed over"
        log(f"{alarm.text}: {done}")
        self._losses.note(step, alarm, done)
        return first

    def close(self) -> None:
        """Ends the thread that watches the progress."""
        if self._progress is not None:
            self._progress.close()


def _append(run_dir: Path, event: Event) -> None:
    """Writes an event; what fails here is told in the log, and never ends a run."""
    try:
        append(run_dir, event)
    except OSError as error:
        log(f"an event could not be written: {error}: {event}")
