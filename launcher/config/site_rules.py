"""The rules of the group ``site``, and of secrets anywhere in a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import Any

from launcher.base.errors import LEFT_OUT, Fault, as_override, nearest
from launcher.base.redaction import HIDDEN, holds_login, is_secret_path, is_secret_variable
from launcher.config.paths import walk
from launcher.contract.site import SiteConfig, time_s

RANK_VARIABLES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONSAFEPATH")
)
"""Variables that the job sets for its ranks."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMORY = re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE)
_BINDINGS = ("none", "sockets", "cores", "threads", "ldoms", "rank", "rank_ldom")
_BINDING = re.compile(rf"((quiet|verbose),)?({'|'.join(_BINDINGS)}|(map|mask)_(cpu|ldom):[0-9a-fx,]+)")
_MOUNT = re.compile(r"[^:,]+:[^:,]+(:[^:,]+)?")


def secret_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Texts under a key that names a secret, and passwords in URLs: they would be stored in files. The value
    is not shown."""
    for path, value in walk(values):
        if isinstance(value, str) and value and (is_secret_path(path) or holds_login(value)):
            rule = "looks like a secret, and settings are written to files that others may read"
            fix = "Set a variable to it, give the variable's name in site.secrets, and read it on the ranks."
            yield Fault(path, HIDDEN, rule, fix)


def secret_variable_faults(site: SiteConfig) -> Iterator[Fault]:
    """Secret variables given with their value instead of by name. The value is not shown."""
    for path, name in _variables(site):
        if "=" in name:
            rule, fix = "must be the name of a variable, without its value", "Give the name alone"
            yield Fault(path, HIDDEN, rule, f"{fix}; the value is taken from where you submit.")
        elif path.endswith(f".{name}") and is_secret_variable(name):
            rule = "looks like a secret, and its value would be written into the job's script"
            way = {"site.secrets": [*site.secrets, name]}
            fix = (
                f"Set it where you submit, and give its name: {' '.join(starmap(as_override, way.items()))}."
            )
            yield Fault(path, HIDDEN, rule, fix, ways=({path: LEFT_OUT, **way},))


def _variables(site: SiteConfig) -> Iterator[tuple[str, str]]:
    """The config path and the name of every variable: of those with a value, then of those named only."""
    for group, values in (("env", site.env), ("node_env", site.node_env)):
        yield from ((f"site.{group}.{name}", name) for name in values)
    for group, names in (("forward", site.forward), ("secrets", site.secrets)):
        yield from ((f"site.{group}[{index}]", name) for index, name in enumerate(names))


def site_faults(site: SiteConfig) -> Iterator[Fault]:
    """Settings of the site that are malformed, or contradict each other."""
    yield from _time_faults(site.time_limit)
    yield from _variable_faults(site)
    yield from _container_faults(site)
    roles = {f"site.roles.{name}": role.memory_per_node for name, role in site.roles.items()}
    for group, memory in {"site": site.memory_per_node, **roles}.items():
        if memory is not None and not _MEMORY.fullmatch(memory):
            rule = "must be a whole number with K, M, G or T (M where none is given)"
            path = f"{group}.memory_per_node"
            meant = re.sub(r"i?B$", "", "".join(memory.split()), flags=re.IGNORECASE)
            ways = tuple({path: value} for value in (*filter(_MEMORY.fullmatch, [meant]), None))
            yield Fault(path, memory, rule, ways=ways)
    if site.cpu_bind is not None and not _BINDING.fullmatch(site.cpu_bind):
        rule = "must be what srun's --cpu-bind takes: none, sockets, cores, threads, ldoms, rank or a map"
        near = nearest(site.cpu_bind, _BINDINGS)
        ways = tuple({"site.cpu_bind": value} for value in (*filter(None, [near]), None))
        yield Fault("site.cpu_bind", site.cpu_bind, rule, ways=ways)
    if site.gpu_request == "gres_typed" and site.gpu_type is None:
        rule = "requests GPUs by type, and site.gpu_type is null"
        fix = "Set site.gpu_type, or site.gpu_request=gres."
        yield Fault("site.gpu_request", site.gpu_request, rule, fix, ways=({"site.gpu_request": "gres"},))
    if site.gpu_request != "gres_typed" and site.gpu_type is not None:
        rule = f"has no effect while site.gpu_request is {site.gpu_request}"
        yield Fault("site.gpu_type", site.gpu_type, rule, ways=({"site.gpu_request": "gres_typed"},))


def _time_faults(limit: str | None) -> Iterator[Fault]:
    if limit is not None and time_s(limit) is None:
        rule = (
            "must be a time as Slurm takes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, UNLIMITED"
        )
        fix = "Half a day is written as 12:00:00, a day and a half as 1-12:00:00."
        yield Fault("site.time_limit", limit, rule, fix)


def _variable_faults(site: SiteConfig) -> Iterator[Fault]:
    """Invalid names of variables, names that the job sets itself, and names given twice."""
    first: dict[str, str] = {"TMPDIR": "site.scratch"} if site.scratch else {}
    for path, name in _variables(site):
        if not _VARIABLE.fullmatch(name):
            yield Fault(path, name, "is not the name of a variable", "Use letters, digits and _.")
        elif name in RANK_VARIABLES:
            fix, ways = f"Remove {name}.", ({path: LEFT_OUT},) if path.endswith(name) else ()
            yield Fault(path, name, "is set by the job for every rank", fix, ways=ways)
        elif name in first:
            yield Fault(path, name, f"is given already as {first[name]}", "Remove one of them.")
        first.setdefault(name, path)


def _container_faults(site: SiteConfig) -> Iterator[Fault]:
    mounts = list(site.container_mounts)
    if mounts and site.container_image is None:
        rule = "has no effect without site.container_image"
        fix, ways = "Set site.container_image, or remove the mounts.", ({"site.container_mounts": LEFT_OUT},)
        yield Fault("site.container_mounts", mounts, rule, fix, ways=ways)
    for index, mount in enumerate(mounts):
        if not _MOUNT.fullmatch(mount):
            rule = "must be SOURCE:TARGET or SOURCE:TARGET:FLAGS, without commas"
            path, folder = f"site.container_mounts[{index}]", mount.strip(":")
            meant = [{path: same} for same in [f"{folder}:{folder}"] if _MOUNT.fullmatch(same)]
            fix = "" if meant else "A folder of the node with its place in the container reads /data:/data."
            yield Fault(path, mount, rule, fix, ways=tuple(meant))
