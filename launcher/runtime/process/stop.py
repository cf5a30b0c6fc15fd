"""Stop requests: a signal sets a flag, and the ranks agree on the step after which they save and end.

Saving is collective, so a rank that saved on its own, in its signal handler or after a step of its
choice, would wait forever for the others.
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
from launcher.runtime.process.log import log

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that request a stop: batch systems send the first, and the second ahead of a time limit."""
INTERVAL_S = 0.5
"""How often the ranks exchange their flags: after every step, where a step takes longer."""


class StopRequest:
    """Whether any rank of the run was requested to stop."""

    def __init__(self, device: torch.device, interval_s: float = INTERVAL_S) -> None:
        self._device, self._interval_s = device, interval_s
        self.received = 0
        """The signal that this rank has received; 0: none."""
        self.agreed = 0
        """The signal on which all ranks stop; 0: none."""
        self._steps_to_exchange = 1

    def arm(self) -> None:
        """Installs the handlers: the signals set the flag, and do nothing else."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def agree(self, step_s: float) -> bool:
        """Whether any rank has received a signal: the same on all ranks, called after every step.

        Collective over all ranks, but not at every call: with the flags the ranks exchange the number of
        steps until the next exchange, the smallest that any of them computes from ``step_s``, the time of a
        step.
        """
        self._steps_to_exchange -= 1
        if self._steps_to_exchange:
            return False
        mine = [-self.received, max(1, int(self._interval_s / step_s))]
        lowest = torch.tensor(mine, dtype=torch.int64, device=self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        signal_number, self._steps_to_exchange = lowest.tolist()
        self.agreed = -signal_number
        return self.agreed > 0

    def write_note(self, run_dir: Path, step: int) -> None:
        """Tells the launcher that the run has stopped on request, saved after ``step`` steps."""
        name = signal.Signals(self.agreed).name
        write_whole(run_dir / STOP_NOTE, json.dumps({"step": step, "signal": name}) + "\n")
        log(f"stopped by {name}: saved after step {step}")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
