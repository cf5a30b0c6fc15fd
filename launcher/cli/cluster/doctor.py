"""``trireme doctor``: what this machine has, and how to mend what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.base.compilers import cxx_compiler, missing_for_compile
from launcher.base.errors import LauncherError
from launcher.base.units import format_bytes
from launcher.cli.arguments import parse
from launcher.runs.devices import installed_gpus, num_visible
from launcher.runs.facts import cpu_model, memory_bytes, num_cores, version

HELP = """\
Looks at this machine, one line each: ok, or how to mend it. "none" is a part that only some runs
need. The exit code is 1 when something has to be mended.
"""
EXAMPLES = """\
  trireme doctor
"""
_SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
_CUDA_QUESTION = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
_CUDA_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor."""

    verdict: Literal["ok", "none", "mend"]
    text: str


def run(words: list[str]) -> int:
    """Prints every finding; returns 1 when something has to be mended."""
    rest = parse("doctor", words).names
    if rest:
        raise LauncherError(f"doctor takes no words, given {' '.join(rest)}")
    verdicts = []
    for name, look in LOOKS.items():
        finding = look()
        print(f"{finding.verdict:5} {name:10} {finding.text}", flush=True)
        verdicts.append(finding.verdict)
    return int("mend" in verdicts)


def python() -> Finding:
    """The interpreter."""
    return Finding(verdict="ok", text=f"{platform.python_version()} at {sys.executable}")


def package(name: str) -> Finding:
    """An installed distribution."""
    found = version(name)
    if found:
        return Finding(verdict="ok", text=found)
    return Finding(verdict="mend", text=f"not installed: {sys.executable} -m pip install {name}")


def devices() -> Finding:
    """CUDA devices, and whether torch can drive them."""
    gpus = installed_gpus()
    if not gpus:
        return Finding(verdict="none", text="no NVIDIA device: ranks run on the CPU (device=cpu)")
    text = f"{num_visible(gpus, os.environ)} of {len(gpus)} visible: {', '.join(sorted(set(gpus)))}"
    driven = _cuda_devices_of_torch()
    if driven:
        return Finding(verdict="ok", text=text)
    build = f"torch {version('torch')} drives none of them"
    return Finding(
        verdict="mend", text=f"{text}; {build}: install torch built for your driver's CUDA version"
    )


def cores() -> Finding:
    """Processor cores that this process may use."""
    return Finding(verdict="ok", text=f"{num_cores()} x {cpu_model()}")


def memory() -> Finding:
    """Memory of the machine."""
    total = memory_bytes()
    if total is None:
        return Finding(verdict="none", text="the system does not tell")
    return Finding(verdict="ok", text=format_bytes(total))


def port() -> Finding:
    """Whether a rendezvous can open a port on this machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Finding(
                verdict="ok", text=f"the system gives free ports, such as {server.getsockname()[1]}"
            )
    except OSError as error:
        text = f"none can be opened on 127.0.0.1 ({error.strerror}): allow it in the firewall or container"
        return Finding(verdict="mend", text=text)


def slurm() -> Finding:
    """Slurm's commands."""
    found = [name for name in _SLURM_COMMANDS if shutil.which(name)]
    if not found:
        return Finding(verdict="none", text="no Slurm command: runs start on this machine")
    missing = [name for name in _SLURM_COMMANDS if name not in found]
    if missing:
        text = f"{', '.join(found)}; not found: {', '.join(missing)}: install slurm-client"
        return Finding(verdict="mend", text=text)
    if not _controller_answers():
        return Finding(verdict="none", text="Slurm's commands are here, and no controller answers them")
    return Finding(verdict="ok", text=", ".join(found))


def _controller_answers() -> bool:
    try:
        asked = subprocess.run(["sinfo", "--noheader"], capture_output=True, check=False, timeout=5)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def compiler() -> Finding:
    """A C++ compiler and what else torch.compile needs; DeepSpeed's own operators need one, too."""
    missing = missing_for_compile(os.environ, "cpu")
    if not missing:
        return Finding(verdict="ok", text=cxx_compiler(os.environ) or "")
    return Finding(verdict="none", text=f"{missing}; only fusion.compile and DeepSpeed's operators need it")


LOOKS: dict[str, Callable[[], Finding]] = {
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
"""Everything that is looked at, in the order of the lines."""


def _cuda_devices_of_torch() -> int:
    """How many devices torch finds, asked of a process of its own."""
    command: Sequence[str] = (sys.executable, "-c", _CUDA_QUESTION)
    try:
        done = subprocess.run(  # noqa: S603 (our own words, no shell)
            command, capture_output=True, text=True, timeout=_CUDA_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 0
    return int(done.stdout) if done.returncode == 0 else 0
