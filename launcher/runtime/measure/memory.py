"""What a rank holds, measured, never by a formula; and a limit on it, for devices that are smaller."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from launcher.base.errors import JobError
from launcher.contract.records import MemoryRecord
from launcher.runtime.measure.kept_bytes import HeldBytes
from launcher.runtime.model.split_backward import SplitBackward

_LOOK_AT = 2
"""The step of a start whose end of the schedule is looked at: by then the optimizer has its state."""
_STATUS = Path("/proc/self/status")


class MemoryGauge:
    """Made before the model is built; looks once at what is held, and in the end at the peak."""

    def __init__(self, device: torch.device, *, follows: bool = False) -> None:
        """``follows``: it also counts what autograd holds in the step that it looks at."""
        self._device = device
        self._follows = follows
        self._held: HeldBytes | None = None
        self._resident = self._built = resident_bytes()
        self._num_steps = 0
        self._states: int | None = None

    def is_built(self) -> None:
        """Once the model is there: from now on the process grows by what the training takes."""
        self._built = resident_bytes()

    def following(self, modules: Iterable[nn.Module], split: SplitBackward) -> AbstractContextManager[object]:
        """To be entered around the schedule of every step."""
        if not self._follows or self._num_steps + 1 != _LOOK_AT:
            return nullcontext()
        self._held = HeldBytes((param for module in modules for param in module.parameters()), split)
        return self._held

    def look(self) -> None:
        """Between the schedule of a step and its update, when every gradient is there."""
        self._num_steps += 1
        if self._num_steps == _LOOK_AT:
            self._states = live_bytes(self._device)

    def record(self, step: int) -> MemoryRecord | None:
        """What was found, after ``step`` steps; None where there were too few to look at."""
        if self._states is None:
            return None
        grown = None
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak, grown = (max(0, peak_resident_bytes() - then) for then in (self._resident, self._built))
        held = self._held
        return MemoryRecord(
            step=step,
            states_bytes=self._states,
            peak_bytes=peak,
            held_peak_bytes=held.peak if held else None,
            held_total_bytes=held.total if held else None,
            grown_bytes=grown,
        )


def live_bytes(device: torch.device) -> int:
    """Bytes of all tensors on a device: those that Python holds and their gradients, each storage once."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    gc.collect()
    held = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    held += [tensor.grad for tensor in held if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in held if tensor.device == device]
    # A compiler's stand-in for a tensor names its device too, and its storage is nowhere.
    real = [storage for storage in storages if storage.device == device]
    return sum({storage.data_ptr(): storage.nbytes() for storage in real}.values())


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux: the peak so far is the nearest there is
        return peak_resident_bytes()
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_resident_bytes() -> int:
    """The most that this process ever had in RAM."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def limit_memory(device: torch.device, limit_bytes: int) -> None:
    """Lets this process hold so much on its device, what it holds already included; an allocation beyond it
    fails as on a device that is full.

    On a CPU what counts beside tensors is whatever libraries and threads take from now on.

    Raises:
        JobError: where the system cannot hold a process to it.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        return
    if not _STATUS.exists():
        raise JobError("device.limits_memory=true needs Linux on a CPU. Set device.limits_memory=false.")
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_written_bytes() - live_bytes(device) + limit_bytes, most))


def _written_bytes() -> int:
    """Writable memory of this process, as the kernel counts it against the limit."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024
