"""Being told to end: a signal sets a flag, and the ranks agree on the step after which they save.

Saving is collective, so a rank that saved on its own, in its signal handler or after a step of its
choice, would wait for ever for the others.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from launcher.base.files import write_whole
from launcher.contract.job import STOP_NOTE
from launcher.runtime.process.log import say

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What tells a rank to end: batch systems send the first, and the second ahead of a time limit."""


INTERVAL_S = 0.5
"""How often the ranks ask each other: after every step, where a step takes longer."""


class StopRequest:
    """Whether any rank of the run was told to end."""

    def __init__(self, device: torch.device, interval_s: float = INTERVAL_S) -> None:
        self._device, self._interval_s = device, interval_s
        self.received = 0
        """The signal that this rank was sent."""
        self.agreed = 0
        """The signal on which all ranks end."""
        self._steps_until_asked = 1

    def arm(self) -> None:
        """From now on the signals set the flag, and do nothing else."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def agree(self, step_s: float) -> bool:
        """Whether any rank was told: the same answer on all, of which each has made the same steps.

        Collective over all ranks, now and then: the answer comes with the number of steps after
        which they ask again, the fewest that ``step_s``, the time of a step, lets one of them choose.
        """
        self._steps_until_asked -= 1
        if self._steps_until_asked:
            return False
        mine = [-self.received, max(1, int(self._interval_s / step_s))]
        lowest = torch.tensor(mine, dtype=torch.int64, device=self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        told, self._steps_until_asked = lowest.tolist()
        self.agreed = -told
        return self.agreed > 0

    def leave_note(self, run_dir: Path, step: int) -> None:
        """Tells the launcher that the run has ended on request, saved after ``step`` steps."""
        name = signal.Signals(self.agreed).name
        (run_dir / STOP_NOTE).parent.mkdir(exist_ok=True)
        write_whole(run_dir / STOP_NOTE, json.dumps({"step": step, "signal": name}) + "\n")
        say(f"told to end by {name}: saved after step {step}")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
