"""What a rank reads from environment variables, here alone: which rank it is, where it meets the others, its
caches, its compiler."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import JobError
from launcher.base.machine import cxx_compiler, installed_gpus, missing_for_compile, num_visible
from launcher.base.resources import home_folder
from launcher.contract.job import LOCK, RENDEZVOUS_FILE, RENDEZVOUS_KEY


@dataclass(frozen=True, kw_only=True)
class ProcessRank:
    """A process among all of the run, by the variables of its starter (torchrun, srun)."""

    rank: int
    local_rank: int
    world_size: int


def process_rank_from_environment() -> ProcessRank:
    """The rank that the process starter has set.

    Raises:
        JobError: naming the variables that are missing.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise JobError(f"{', '.join(missing)} not set: start ranks with `trireme run`, not by hand")
    rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    return ProcessRank(rank=rank, local_rank=local_rank, world_size=world_size)


def rendezvous_file() -> str | None:
    """The file in which the ranks of one host meet, where the executor names one."""
    return os.environ.get(RENDEZVOUS_FILE)


def rendezvous_key() -> str:
    """What the keys in the store of the ranks begin with."""
    return os.environ.get(RENDEZVOUS_KEY, "")


def lock_token() -> str:
    """The token of the run directory's lock; empty where the ranks were started without one."""
    return os.environ.get(LOCK, "")


def num_visible_gpus() -> int:
    """How many of this machine's NVIDIA devices this process may use."""
    return num_visible(installed_gpus(), os.environ)


def user_cache() -> Path:
    """The folder for files that can be made again, by the XDG base directory specification."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else home_folder() / ".cache") / "trireme"


def prepare_compiler(device_kind: str) -> None:
    """Sets the compiler and the cache folder of torch.compile, unless the environment already does. To be
    called before torch compiles: it reads both once.

    Compiled code is kept for later runs, in a folder for each machine: others may have other processors.
    Ranks share it: torch writes its files under temporary names and locks them meanwhile.

    Raises:
        JobError: when this machine cannot compile, with the fix.
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
