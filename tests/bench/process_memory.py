"""The memory of this process: its size, its peak and its limit."""

from __future__ import annotations

import resource
from pathlib import Path


def reset_peak_resident() -> int:
    """Forgets the peak resident size of this process; returns its size now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The peak resident size since `reset_peak_resident`."""
    return _status_bytes("VmHWM")


def limit_memory(more_bytes: int) -> None:
    """Lets this process allocate so much more, and no more: a device of that size."""
    allowed = _status_bytes("VmData") + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
