"""Settings of a site: what is specific to one cluster's batch system."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from launcher.typed.read import read_while
from launcher.typed.scalars import PositiveInt

_TIME = re.compile(r"(\d{1,9}-)?\d{1,9}(:[0-5]?\d){0,2}")
_MOST_S = 2**31 - 1
"""Slurm counts a time in a C int."""


def time_s(text: str) -> float | None:
    """Seconds of a time in Slurm's notation, infinite where it is unlimited; None for any other text.

    Source: sbatch(1), --time.

    >>> [time_s(text) for text in ("90", "90:30", "100:00:00", "3-00", "2-12:30", "UNLIMITED", "soon")]
    [5400, 5430, 360000, 259200, 217800, inf, None]
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    if not _TIME.fullmatch(text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # After days come hours. Alone, one number is minutes, and two are minutes and seconds.
    parts = parts if dash or len(parts) == 3 else [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    whole = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return whole if whole <= _MOST_S else None


@dataclass(frozen=True, kw_only=True)
class RoleSite:
    """Nodes for one role beside the trainers, such as a parameter server's ``server``: a component of its own
    in a heterogeneous job, without devices. Other settings are those of the site, except ``options``."""

    partition: str | None = None
    """Partition; null = that of the site."""
    constraint: str | None = None
    """Features that every node has."""
    ranks_per_node: PositiveInt = 1
    """Ranks of the role on one node."""
    cpus_per_rank: PositiveInt | None = None
    """Processors of one rank; null = the site's default."""
    memory_per_node: str | None = None
    """Memory of a node, such as ``64G``; ``0``: all of it; null = not asked for."""


@dataclass(frozen=True, kw_only=True)
class SiteConfig:
    """What is specific to one cluster's batch system, and belongs to no recipe."""

    name: str = "none"
    """Name shown in the plan."""
    account: str | None = None
    """Account that the job is charged to."""
    partition: str | None = None
    """Partition, or several separated by commas; null = the site's default."""
    qos: str | None = None
    """Quality of service."""
    reservation: str | None = None
    """Reservation to run in."""
    constraint: str | None = None
    """Features that every node has, in Slurm's syntax."""
    nodelist: str | None = None
    """Nodes that the job includes, such as ``node[01-03]``."""
    exclude: str | None = None
    """Nodes that the job avoids."""
    time_limit: str | None = None
    """Longest run, as sbatch takes it: ``HH:MM:SS``, ``D-HH:MM:SS``, ``D-HH``, or minutes; ``UNLIMITED`` or
    ``0`` = none; null = the partition's default."""
    gpu_request: Literal["gpus_per_node", "gres", "gres_typed", "none"] = field(
        default="gpus_per_node", metadata=read_while("device.kind", "cuda", neutral="none")
    )
    """How devices of kind cuda are asked for; ``none``: not at all, where whole nodes are given."""
    gpu_type: str | None = field(default=None, metadata=read_while("device.kind", "cuda"))
    """Type of ``gres_typed``, such as ``h100``."""
    memory_per_node: str | None = None
    """Memory of a node, such as ``64G``; ``0``: all of it; null = not asked for."""
    cpus_per_rank: PositiveInt | None = None
    """Processors of one rank; null = the site's default."""
    cpu_bind: str | None = None
    """How srun binds tasks to processors, such as ``cores`` or ``none``; null = the site's default."""
    options: Mapping[str, bool | str] = field(default_factory=dict)
    """Further sbatch options by name, such as ``mail-type: END``; ``true`` for one without a value. Names and
    values are checked like settings."""
    python: str | None = None
    """Interpreter on the nodes; null = the one that submits."""
    modules: tuple[str, ...] = ()
    """Modules that are loaded first."""
    setup: tuple[str, ...] = ()
    """Shell lines that run on the first node before the ranks start, as they are written."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks, taken as written."""
    node_env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks in which ``$NAME`` is expanded on the first node."""
    scratch: str | None = None
    """Folder for temporary files, in which ``$NAME`` is expanded; made on every node where it is absent,
    and known to the ranks as ``TMPDIR``."""
    forward: tuple[str, ...] = ()
    """Names of variables that are copied from where the job is submitted."""
    secrets: tuple[str, ...] = ()
    """The same for variables whose values may be in no file of the run; each must be set."""
    container_image: str | None = None
    """Image that the ranks run in, started by Slurm's pyxis plugin."""
    container_mounts: tuple[str, ...] = ()
    """``SOURCE:TARGET`` or ``SOURCE:TARGET:FLAGS``; the run directory is always mounted."""
    host_suffix: str = ""
    """Appended to the first host's name, where a faster network has names of its own."""
    network_interface: str | None = None
    """Interface that gloo and NCCL use, such as ``ib0``; null = their own choice."""
    roles: Mapping[str, RoleSite] = field(default_factory=dict)
    """Nodes of their own for roles beside the trainers, by the role's name; one that is not here has its
    ranks on the cluster's devices, after those of the trainers."""
    group_access: Literal["none", "read"] = "none"
    """Who else may read the directory of a run, with its logs, measurements and checkpoints: ``none``:
    nobody; ``read``: a group, which may write nothing in it. Also of runs on this machine."""
    group: str | None = field(default=None, metadata=read_while("site.group_access", "read"))
    """Name of that group; null = the group that new files have."""
    is_one_machine: bool = False
    """Whether all nodes are one machine, where a baseline waits for its run to end: side by side they
    would slow each other down."""

    @property
    def time_limit_s(self) -> float:
        """Seconds; infinite where there is no limit, or the partition's default."""
        return time_s(self.time_limit or "0") or math.inf
