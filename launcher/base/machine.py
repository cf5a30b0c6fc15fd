"""What this machine has: processors, memory, CUDA devices, and what torch.compile needs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

_CXX_COMPILERS = ("g++", "c++", "clang++")


def cpu_model() -> str:
    """The product name of the processor."""
    return _proc_value("cpuinfo", "model name") or platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Memory of this machine, None where the system does not say."""
    total = _proc_value("meminfo", "MemTotal")
    return int(total.split()[0]) * 1024 if total else None


def free_memory_bytes() -> int | None:
    """Memory of this machine that can be had without swapping, None where the system does not say."""
    available = _proc_value("meminfo", "MemAvailable")
    return int(available.split()[0]) * 1024 if available else None


def free_disk_bytes(path: str) -> int:
    """What a process may still write to the file system of a path, or of the nearest folder that exists.

    Raises:
        OSError: when that cannot be read.
    """
    folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def installed_gpus() -> list[str]:
    """The product names of this machine's NVIDIA devices, as the driver lists them."""
    listed = command_output(("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"), timeout_s=20)
    return (listed or "").split("\n")[:-1]


def num_visible(installed: Sequence[str], environment: Mapping[str, str]) -> int:
    """How many devices a process may use: all, or those that CUDA_VISIBLE_DEVICES names.

    An entry may be an index, a UUID or a MIG id; none counts from an index of -1 on.

    >>> num_visible(["H200"] * 8, {"CUDA_VISIBLE_DEVICES": "4,GPU-8c1b,-1,6"})
    2
    """
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is None or not installed:
        return len(installed)
    entries = [name.strip() for name in names.split(",")] if names.strip() else []
    return entries.index("-1") if "-1" in entries else len(entries)


def cxx_compiler(environ: Mapping[str, str]) -> str | None:
    """Path of the C++ compiler: the one that ``CXX`` names, else the first that is installed."""
    named = environ.get("CXX")
    return next(filter(None, map(shutil.which, (named,) if named else _CXX_COMPILERS)), None)


def missing_for_compile(environ: Mapping[str, str], device_kind: str) -> str:
    """What torch.compile needs (a C++ compiler, Python's headers, on a GPU Triton) and this machine lacks,
    with the fix; empty: nothing."""
    if cxx_compiler(environ) is None:
        named = environ.get("CXX")
        if named:
            return f"no C++ compiler {named}, which CXX names: correct or unset it"
        return "no C++ compiler (g++, c++ or clang++): install g++, or name one in CXX"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        return f"no Python.h in {headers}: install Python's headers (python3-dev)"
    if device_kind == "cuda" and find_spec("triton") is None:
        return "no Triton, which compiles GPU kernels: install triton"
    return ""


def _proc_value(file: str, key: str) -> str | None:
    path = Path("/proc", file)
    if not path.exists():
        return None
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), None)


def command_output(
    words: Sequence[str], *, timeout_s: float, variables: Mapping[str, str] | None = None
) -> str | None:
    """What a command prints, with ``variables`` in its environment; None where it is not installed, fails, or
    takes longer than ``timeout_s``."""
    program = shutil.which(words[0])
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 (no shell, and no word of the user's)
            [program, *words[1:]],
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, **(variables or {})},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None
