"""Which rank this process is: the one place of the runtime that reads environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import JobError


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process among all that were started."""

    rank: int
    local_rank: int
    world_size: int


def place_from_environment() -> Place:
    """The place that the process starter gave.

    Raises:
        JobError: when its variables are missing; names them.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise JobError(f"{', '.join(missing)} not set: start ranks with `trireme run`, not by hand")
    rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    return Place(rank=rank, local_rank=local_rank, world_size=world_size)


def user_cache() -> Path:
    """The folder for files that can be made again, by the XDG base directory rule."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "trireme"
