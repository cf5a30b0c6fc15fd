"""Processes of this machine, told apart from later ones that get the same number."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def birth_of(pid: int) -> str:
    """When a process began, as a text that no other process with this number has; empty when it is gone."""
    if sys.platform != "linux":
        return _listed(pid, "lstart")
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return "" if state == "Z" else f"{fields[18]} ticks after boot {boot}"
    return ""


def system_id() -> str:
    """Within what the number of a process means one process: this start of the machine, and in it this space
    of process numbers, as a container has one of its own; empty where the system does not tell."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def is_called_with(pid: int, words: Collection[str]) -> bool:
    """Whether these are words of the command line of a process."""
    if sys.platform != "linux":
        return all(word in _listed(pid, "command") for word in words)
    return {*words} <= {*command_line(pid)}


def command_line(pid: int) -> list[str]:
    """The words that a process was called with; none where it is gone. Elsewhere than on Linux words with
    spaces are several."""
    if sys.platform != "linux":
        return _listed(pid, "command").split()
    with suppress(OSError):
        return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    return []


def parent_of(pid: int) -> int:
    """The parent of a process; 0 where it is gone."""
    if sys.platform != "linux":
        return int(_listed(pid, "ppid") or 0)
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _listed(pid: int, what: str) -> str:
    command = ("ps", "-o", f"{what}=", "-p", str(pid))
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603
    return ""
