"""``status.json``: the state of a run as it was recorded last, and the process that recorded it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Literal

from launcher.base.files import read_json
from launcher.base.processes import birth_of
from launcher.contract.job import JobState, Phase
from launcher.typed.read import Reading, read

RunPhase = Phase | Literal["prepared"]
"""Phase of a run: that of its job, or ``prepared`` before there is one."""
ACTIVE = ("prepared", "pending", "running")
"""Phases of a run that has not ended."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of the file."""

    phase: RunPhase = "failed"
    exit_code: int | None = None
    reason: str = ""
    rank: int | None = None
    started: str = ""
    """Time of the first record, ISO 8601."""
    changed: str = ""
    """Time since when the run is in this phase, ISO 8601."""
    pid: int | None = None
    birth: str = ""
    """When the process began (`birth_of`); empty in the files of earlier versions."""
    hostname: str = ""

    @property
    def is_active(self) -> bool:
        """Whether the run had not ended."""
        return self.phase in ACTIVE

    @property
    def is_of_this_host(self) -> bool:
        """Whether the process that recorded it was one of this machine."""
        return self.pid is not None and self.hostname == socket.gethostname()

    @property
    def is_followed(self) -> bool:
        """Whether that process is alive on this machine."""
        if self.pid is None or not self.is_of_this_host:
            return False
        birth = birth_of(self.pid)
        return birth == self.birth if self.birth else bool(birth)

    @property
    def since_s(self) -> float | None:
        """Time since when the run is in this phase, in seconds of the Unix epoch."""
        with suppress(ValueError):
            return datetime.fromisoformat(self.changed).timestamp()
        return None

    def state(self) -> JobState:
        """The state of the run's job."""
        return JobState(
            phase="pending" if self.phase == "prepared" else self.phase,
            exit_code=self.exit_code,
            reason=self.reason,
            rank=self.rank,
            since_s=self.since_s,
        )


class BrokenStatus(Status):
    """That of a file that cannot be read: nothing is known of the run."""


def read_status(path: Path) -> Status:
    """The status in a file; one that is missing or broken is that of a run that has failed, and says why."""
    values = read_json(path)
    if not values:
        is_there = os.path.lexists(path)
        broken = BrokenStatus(reason=f"broken: {path.name} holds no record")
        return broken if is_there else Status(reason=f"it has no {path.name}")
    reading = Reading()
    known = {field.name: values[field.name] for field in fields(Status) if field.name in values}
    status = read(Status, known, reading)
    return status or BrokenStatus(reason=f"broken: {path.name}: {reading.faults[0]}")


def status_now(phase: RunPhase, started: str, since_s: float | None) -> Status:
    """A phase recorded by this process. ``since_s``: as `Status.since_s`; None: since now."""
    now = datetime.now().astimezone()
    changed = now if since_s is None else datetime.fromtimestamp(since_s).astimezone()
    return Status(
        phase=phase,
        started=started or now.isoformat(timespec="microseconds"),
        changed=changed.isoformat(timespec="microseconds"),
        pid=os.getpid(),
        birth=birth_of(os.getpid()),
        hostname=socket.gethostname(),
    )
