"""What a run was made with: versions, hardware, git state. Only variables of a fixed list, so no secret."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import launcher
from launcher.base.machine import command_output, cpu_model, memory_bytes, num_cores

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
)
_NO_HOOKS = ("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false")
_NOTHING_FETCHED: Mapping[str, str] = {"GIT_ALLOW_PROTOCOL": "none", "GIT_OPTIONAL_LOCKS": "0"}
_DIFF = ("diff", "--binary", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "HEAD")
"""Git would look into a submodule by a process of its own, with that one's settings."""
_NO_FILTER = ("unspecified", "unset", "set")


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


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A git working tree that a run takes code or recipes from."""

    root: str
    commit: str | None
    """None before the first commit."""
    untracked: tuple[str, ...]
    """Files that neither the commit nor the patch holds."""
    patch: str
    """``git diff`` of the tracked files against the commit."""
    uncompared: tuple[str, ...] = ()
    """What the patch does not tell: files with a filter, which is not run, that may have changed; ``.``, all
    of them, where git fails."""


def checkouts(folders: Iterable[str] = ()) -> tuple[Checkout, ...]:
    """The git working trees of this program, of the current folder and of ``folders``; none without git."""
    package = Path(launcher.__file__).parent
    found = (package, Path.cwd(), *folders)
    roots = [_git(str(folder), ("rev-parse", "--show-toplevel"), _NOTHING_FETCHED) for folder in found]
    return tuple(_checkout(root.rstrip("\n")) for root in dict.fromkeys(roots) if root)


def _checkout(root: str) -> Checkout:
    ask = partial(git, root, filters=filters_off(root))
    commit = ask(("rev-parse", "--verify", "--quiet", "HEAD"))
    listed = ask(("ls-files", "--others", "--exclude-standard", "-z"))
    changes = _changes(ask) if commit else ("", ())
    patch, uncompared = changes or ("", (".",))
    return Checkout(
        root=root,
        commit=commit.strip() if commit else None,
        untracked=tuple(sorted(filter(None, (listed or "").split("\0")))),
        patch=patch,
        uncompared=(".",) if listed is None else uncompared,
    )


def _changes(ask: Callable[[Iterable[str]], str | None]) -> tuple[str, tuple[str, ...]] | None:
    """The patch, and the changed files that it leaves out as they have a filter; None where git fails."""
    listed = ask((*_DIFF, "--name-only", "--no-renames", "-z"))
    names = tuple(filter(None, (listed or "").split("\0")))
    if not names:
        return None if listed is None else ("", ())
    attributes = ask(("check-attr", "-z", "filter", "--", *names))
    words = (attributes or "").split("\0")
    filtered = tuple(
        name for name, value in zip(words[::3], words[2::3], strict=False) if value not in _NO_FILTER
    )
    patch = ask((*_DIFF, "--", ".", *(f":(exclude,literal){name}" for name in filtered)))
    return None if attributes is None or patch is None else (patch, filtered)


def git(folder: str, words: Iterable[str], filters: Mapping[str, str]) -> str | None:
    """What git prints, or None where it fails or is absent. It runs no program that the repository names: a
    hook, a monitor, a filter of its files, a transport that fetches what is missing.

    ``filters``: `filters_off` of this working tree.
    """
    return _git(folder, words, {**_NOTHING_FETCHED, **filters})


def filters_off(folder: str) -> dict[str, str]:
    """The variables for git by which it runs no filter of a working tree."""
    listed = _git(folder, ("config", "-z", "--name-only", "--get-regexp", r"^filter\."), _NOTHING_FETCHED)
    filters = dict.fromkeys(filter(None, (listed or "").split("\0")))
    inherited = os.environ.get("GIT_CONFIG_COUNT", "")
    first = int(inherited) if inherited.isdecimal() else 0
    variables = {"GIT_CONFIG_COUNT": str(first + len(filters))}
    for number, name in enumerate(filters, first):
        variables[f"GIT_CONFIG_KEY_{number}"] = name
        variables[f"GIT_CONFIG_VALUE_{number}"] = "false" if name.endswith(".required") else ""
    return variables


def _git(folder: str, words: Iterable[str], variables: Mapping[str, str]) -> str | None:
    return command_output(("git", "-C", folder, *_NO_HOOKS, *words), timeout_s=20, variables=variables)
