"""Which rank this process is: the one place of the runtime that reads environment variables."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import JobError
from launcher.base.machine import cxx_compiler, missing_for_compile


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


def prepare_compiler(device_kind: str) -> None:
    """Names the compiler and the folder of torch.compile, unless the environment already does. Before torch
    is asked to compile: it reads both once.

    What was compiled is kept for later runs, in a folder of each machine: others may have other processors.
    Its files are written under other names first and locked while they are made, so ranks share them.

    Raises:
        JobError: when this machine cannot compile, with the way to mend it.
    """
    missing = missing_for_compile(os.environ, device_kind)
    if missing:
        host = socket.gethostname()
        raise JobError(f"fusion.compile: {host} has {missing}, or set fusion.compile=none")
    os.environ.setdefault("CXX", cxx_compiler(os.environ) or "")
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = user_cache() / "compiled" / socket.gethostname()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
