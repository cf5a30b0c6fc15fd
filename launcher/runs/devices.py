"""Whether this machine has the devices that a local run asks for."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from launcher.base.errors import Fault
from launcher.base.units import counted
from launcher.contract.plan import Plan

_TIMEOUT_S = 20


def installed_gpus() -> list[str]:
    """The product names of the NVIDIA devices of this machine, as its driver lists them."""
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603 (fixed words, no shell)
            [nvidia_smi, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


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


def device_faults(plan: Plan, environment: Mapping[str, str]) -> list[Fault]:
    """A fault when a plan for CUDA has more ranks than this machine has devices to give."""
    if plan.config.device.kind != "cuda":
        return []
    visible = num_visible(installed_gpus(), environment)
    if plan.world_size <= visible:
        return []
    names = environment.get("CUDA_VISIBLE_DEVICES")
    shown = f" (CUDA_VISIBLE_DEVICES={names})" if names is not None else ""
    pairs = f"{counted(plan.world_size, 'rank')} on as many CUDA devices"
    rule = f"the plan has {pairs}, and {visible} can be used here{shown}"
    fix = "Use fewer ranks, or set" if visible else "Set"
    return [Fault("device.kind", "cuda", rule, f"{fix} device=cpu cluster=local_cpu.")]
