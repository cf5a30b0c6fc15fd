"""What a run was made with: versions, hardware, sources. No secret: variables are an allow-list."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import launcher

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
)
_GIT_TIMEOUT_S = 20


def environment_facts() -> dict[str, Any]:
    """Versions and hardware, without importing what they are the versions of."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "deepspeed": version("deepspeed"),
        "trireme-launcher": version("trireme-launcher"),
        "system": platform.platform(),
        "hostname": socket.gethostname(),
        "cpu_model": cpu_model(),
        "num_cores": num_cores(),
        "memory_bytes": memory_bytes(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The product name of the processor."""
    return _proc_value("cpuinfo", "model name") or platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Memory of this machine, where the system tells."""
    total = _proc_value("meminfo", "MemTotal")
    return int(total.split()[0]) * 1024 if total else None


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A git work tree that a run takes code or recipes from."""

    root: str
    commit: str | None
    """None before the first commit."""
    untracked: tuple[str, ...]
    """Files that neither the commit nor the patch holds."""
    patch: str
    """What tracked files differ from the commit."""


def checkouts(folders: Iterable[str] = ()) -> tuple[Checkout, ...]:
    """The git work trees of this program, of the current folder and of ``folders``; none without git."""
    package = Path(launcher.__file__).parent
    places = (package, Path.cwd(), *map(Path, folders))
    roots = dict.fromkeys(root for folder in places if (root := _git_root(folder)))
    return tuple(_checkout(root) for root in roots)


def _checkout(root: str) -> Checkout:
    commit = git(root, ("rev-parse", "--verify", "--quiet", "HEAD"))
    listed = git(root, ("ls-files", "--others", "--exclude-standard", "-z")) or ""
    return Checkout(
        root=root,
        commit=commit.strip() if commit else None,
        untracked=tuple(sorted(filter(None, listed.split("\0")))),
        patch=(git(root, ("diff", "--binary", "HEAD")) or "") if commit else "",
    )


def _git_root(folder: Path) -> str | None:
    found = git(str(folder), ("rev-parse", "--show-toplevel"))
    return found.rstrip("\n") if found else None


def git(folder: str, words: Iterable[str]) -> str | None:
    """What git prints, or None where it fails or is absent."""
    git = shutil.which("git")
    if git is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 (fixed words, no shell)
            [git, "-C", folder, *words], capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


def _proc_value(file: str, key: str) -> str | None:
    path = Path("/proc", file)
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
