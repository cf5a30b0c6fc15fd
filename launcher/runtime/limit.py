"""A device that is smaller than the machine: what a rank may take of its memory, and no more."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from launcher.errors import JobError
from launcher.runtime.memory import live_bytes

_STATUS = Path("/proc/self/status")


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
