"""``trireme doctor``: what this machine has, and how to fix what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Literal, NamedTuple

from launcher.base.errors import LauncherError
from launcher.base.machine import (
    command_output,
    cpu_model,
    cxx_compiler,
    installed_gpus,
    memory_bytes,
    missing_for_compile,
    num_cores,
    num_visible,
)
from launcher.base.units import format_bytes
from launcher.runs.facts import version

_SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
_CUDA_DEVICES = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


class Check(NamedTuple):
    """The result of one check."""

    status: Literal["ok", "none", "fix"]
    text: str


def doctor(given: Namespace) -> int:
    """Looks at this machine, one line each: ok, or how to fix it. "none" is a part that only some runs
    need. The exit code is 1 when something has to be fixed.

    Examples:
      trireme doctor
    """
    rest = given.names
    if rest:
        raise LauncherError(f"doctor takes no words, given {' '.join(rest)}")
    statuses = []
    for name, check in CHECKS.items():
        status, text = check()
        print(f"{status:5} {name:10} {text}", flush=True)
        statuses.append(status)
    return int("fix" in statuses)


def python() -> Check:
    """The interpreter."""
    return Check("ok", f"{platform.python_version()} at {sys.executable}")


def package(name: str) -> Check:
    """An installed distribution."""
    found = version(name)
    if found:
        return Check("ok", found)
    return Check("fix", f"not installed: {sys.executable} -m pip install {name}")


def devices() -> Check:
    """CUDA devices, and whether torch can use them."""
    gpus = installed_gpus()
    if not gpus:
        return Check("none", "no NVIDIA device: ranks run on the CPU (device=cpu)")
    text = f"{num_visible(gpus, os.environ)} of {len(gpus)} visible: {', '.join(sorted(set(gpus)))}"
    if int(command_output((sys.executable, "-P", "-c", _CUDA_DEVICES), timeout_s=60) or 0):
        return Check("ok", text)
    build = f"torch {version('torch')} can use none of them"
    return Check("fix", f"{text}; {build}: install torch built for your driver's CUDA version")


def cores() -> Check:
    """Processor cores that this process may use."""
    return Check("ok", f"{num_cores()} x {cpu_model()}")


def memory() -> Check:
    """Memory of the machine."""
    total = memory_bytes()
    return Check("none", "not reported by the system") if total is None else Check("ok", format_bytes(total))


def port() -> Check:
    """Whether a rendezvous can open a port on this machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Check("ok", f"the system gives free ports, such as {server.getsockname()[1]}")
    except OSError as error:
        text = f"none can be opened on 127.0.0.1 ({error.strerror}): allow it in the firewall or container"
        return Check("fix", text)


def slurm() -> Check:
    """Slurm's commands."""
    found = [name for name in _SLURM_COMMANDS if shutil.which(name)]
    if not found:
        return Check("none", "no Slurm command: runs start on this machine")
    missing = [name for name in _SLURM_COMMANDS if name not in found]
    if missing:
        return Check("fix", f"{', '.join(found)}; not found: {', '.join(missing)}: install slurm-client")
    if command_output(("sinfo", "--noheader"), timeout_s=5) is None:
        return Check("none", "Slurm's commands are installed, but no controller answers")
    return Check("ok", ", ".join(found))


def compiler() -> Check:
    """A C++ compiler and what else torch.compile needs; DeepSpeed's own operators need one, too."""
    missing = missing_for_compile(os.environ, "cpu")
    if not missing:
        return Check("ok", cxx_compiler(os.environ) or "")
    return Check("none", f"{missing}; only fusion.compile and DeepSpeed's operators need it")


CHECKS: dict[str, Callable[[], Check]] = {
    "python": python,
    "torch": lambda: package("torch"),
    "deepspeed": lambda: package("deepspeed"),
    "hydra": lambda: package("hydra-core"),
    "devices": devices,
    "cores": cores,
    "memory": memory,
    "port": port,
    "slurm": slurm,
    "compiler": compiler,
}
"""Every check, in the order of the lines."""
