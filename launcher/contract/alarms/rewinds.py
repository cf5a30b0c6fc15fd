"""Which batches a training has passed over when it went back to a checkpoint.

After an alarm in step s the ranks load the newest intact checkpoint, of step c, and make the steps from c on
with the batches that follow the one of step s: all those that made the alarm are passed over.

    steps    0 1 2 3 4 5         back to step 4     4 5 6 ...
    batches  0 1 2 3 4 5 (alarm)                    6 7 8 ...

Source: Chowdhery et al., PaLM (2022), section 5.1, "Training instability".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import JobError
from launcher.base.files import read_json, write_whole
from launcher.typed.read import Reading, plain, read
from launcher.typed.scalars import NonNegativeInt, PositiveInt

REWINDS = "rewinds.json"
"""The file, in the run directory; absent where the run never went back."""


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """One time that the training went back."""

    alarm_step: NonNegativeInt
    """0-based, as all steps here."""
    checkpoint_step: NonNegativeInt
    """Steps done by the checkpoint: the first step that is made again."""
    num_passed: PositiveInt
    """Batches that lie between the last one before the checkpoint and the first one after it."""


@dataclass(frozen=True, kw_only=True)
class Rewinds:
    """All times, in their order.

    >>> once = Rewinds().rewound(5, 4)
    >>> [once.batch_of(step) for step in (3, 4, 5)]
    [3, 6, 7]
    >>> [once.rewound(4, 4).batch_of(step) for step in (3, 4, 5)]
    [3, 7, 8]
    >>> [once.rewound(4, 2).batch_of(step) for step in (1, 2, 3, 4)]  # the checkpoint of step 4 was damaged
    [1, 7, 8, 9]
    """

    rewinds: tuple[Rewind, ...] = ()

    def batch_of(self, step: int) -> int:
        """Which batch of the data a step is made with, both 0-based."""
        return step + sum(each.num_passed for each in self._in_effect() if step >= each.checkpoint_step)

    def rewound(self, alarm_step: int, checkpoint_step: int) -> Rewinds:
        """With one more, from an alarm in a step to a checkpoint."""
        before = Rewinds(
            rewinds=tuple(each for each in self._in_effect() if each.checkpoint_step <= checkpoint_step)
        )
        num_passed = self.batch_of(alarm_step) + 1 - before.batch_of(checkpoint_step)
        newest = Rewind(alarm_step=alarm_step, checkpoint_step=checkpoint_step, num_passed=num_passed)
        return Rewinds(rewinds=(*self.rewinds, newest))

    def _in_effect(self) -> Sequence[Rewind]:
        """Without those to a later step than one after them: those steps are made anew."""
        kept: list[Rewind] = []
        for each in self.rewinds:
            kept = [other for other in kept if other.checkpoint_step <= each.checkpoint_step]
            kept.append(each)
        return kept


def read_rewinds(run_dir: Path) -> Rewinds:
    """Those of a run so far.

    Raises:
        JobError: when the file is damaged.
    """
    path = run_dir / REWINDS
    if not path.exists():
        return Rewinds()
    values = read_json(path)
    found = read(Rewinds, values, Reading()) if values else None
    if found is None:
        raise JobError(f"{path} is damaged, and tells which batches were passed over")
    return found


def write_rewinds(run_dir: Path, rewinds: Rewinds) -> None:
    """Records them, before any step is made with another batch."""
    write_whole(run_dir / REWINDS, json.dumps(plain(rewinds), indent=1) + "\n", is_durable=True)
