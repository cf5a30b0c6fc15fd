"""world = dp * tp * pp trainer ranks plus the other roles' ranks, one on each device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd, prod
from typing import Any

from launcher.base.arithmetic import divisors, listed, multiples_around, nearest_first
from launcher.base.errors import Fault
from launcher.base.units import counted
from launcher.config.paths import blamed, value_at
from launcher.contract.config import LaunchConfig
from launcher.contract.mesh import AXES
from launcher.contract.strategy import RoleGroup
from launcher.typed.read import Source

_SETTINGS = ("parallel.dp", "parallel.tp", "parallel.pp", "cluster.nodes", "cluster.devices_per_node")
_MAX_SIZES = 4
"""Sizes of one axis that are proposed, the nearest first."""


def solve_dp(config: LaunchConfig, others: Sequence[RoleGroup], sources: Mapping[str, Source]) -> int | Fault:
    """Data-parallel replicas: as given, or for ``auto`` as many as the devices hold.

    On the CPU, where a device is a process that shares the cores with the others, ``auto`` is 1.
    """
    parallel, free = config.parallel, _free_devices(config, others)
    if parallel.dp != "auto":
        return parallel.dp
    if config.device.kind == "cpu" and config.cluster.allow_idle_devices:
        return 1
    unit = parallel.tp * parallel.pp
    if free >= unit and (free % unit == 0 or config.cluster.allow_idle_devices):
        return free // unit
    left, size = "devices", str(free)
    if others:
        devices = free + sum(role.num_ranks for role in others)
        left = f"(devices{''.join(f' - {role.name}s' for role in others)})"
        size = f"({devices}{''.join(f' - {role.num_ranks}' for role in others)})"
    rule = f"dp = {left} / (tp * pp) = {size} / ({parallel.tp} * {parallel.pp}) "
    if free < unit:
        rule += "is below 1"
    else:
        rule += f"is not whole: tp * pp = {unit} must divide {free} ({listed(divisors(free))})"
    return _fault(config, others, rule, sources)


def world_faults(
    config: LaunchConfig, dp: int, others: Sequence[RoleGroup], sources: Mapping[str, Source]
) -> tuple[Fault, ...]:
    """Faults of a world that has not one rank for each device."""
    cluster, parallel = config.cluster, config.parallel
    devices, unit = cluster.nodes * cluster.devices_per_node, parallel.tp * parallel.pp
    world = dp * unit + sum(role.num_ranks for role in others)
    if world == devices or (world < devices and cluster.allow_idle_devices):
        return ()
    verdict = "which is too few; dp counts whole replicas, each of tp * pp ranks"
    if world < devices:
        verdict = f"{devices - world} would stay idle"
    names = "".join(f" + {role.name}s" for role in others)
    sizes = "".join(f" + {role.num_ranks}" for role in others)
    rule = (
        f"world = dp * tp * pp{names} = {dp} * {parallel.tp} * {parallel.pp}{sizes} = "
        f"{counted(world, 'rank')}{_origins(others, sources)}, the cluster has nodes * devices_per_node = "
        f"{cluster.nodes} * {cluster.devices_per_node} = {counted(devices, 'device')}: {verdict}"
    )
    return (_fault(config, others, rule, sources),)


def rank_order_faults(rank_order: str) -> tuple[Fault, ...]:
    """Faults of an order that does not name every axis once."""
    if sorted(rank_order.split("-")) == sorted(AXES):
        return ()
    rule = f"must name each of {', '.join(AXES)} once, the outermost first"
    return (Fault("parallel.rank_order", rank_order, rule, ways=({"parallel.rank_order": "-".join(AXES)},)),)


def _free_devices(config: LaunchConfig, others: Iterable[RoleGroup]) -> int:
    devices = config.cluster.nodes * config.cluster.devices_per_node
    return devices - sum(role.num_ranks for role in others)


def _fault(
    config: LaunchConfig, others: Sequence[RoleGroup], rule: str, sources: Mapping[str, Source]
) -> Fault:
    """A fault of the setting that was typed, of dp when it was none or another one."""
    sized_by = tuple(role.sized_by for role in others if role.sized_by)
    path = blamed((*_SETTINGS, *sized_by), sources)
    return Fault(path, value_at(config, path), rule, ways=tuple(_ways(config, others)))


def _ways(config: LaunchConfig, others: Sequence[RoleGroup]) -> Iterator[Mapping[str, Any]]:
    """Each term of the world in turn made to fit the others, then the cluster made to fit the world."""
    cluster, parallel, free = config.cluster, config.parallel, _free_devices(config, others)
    is_open, dp = parallel.dp == "auto", 1 if parallel.dp == "auto" else parallel.dp
    sizes = {"parallel.dp": dp, "parallel.pp": parallel.pp, "parallel.tp": parallel.tp}
    unit = prod(sizes.values())
    for role in others:
        room = role.num_ranks + free - unit
        if role.sized_by and room > 0:
            yield {role.sized_by: room}
    for path, size in sizes.items():
        room, over = divmod(free, unit // size)
        if room and (cluster.allow_idle_devices or not over) and not (is_open and path == "parallel.dp"):
            choices = divisors(room) if is_open or cluster.allow_idle_devices else (room,)
            yield from ({path: choice} for choice in nearest_first(size, choices)[:_MAX_SIZES])
    if is_open:
        filling = multiples_around(cluster.nodes, unit // gcd(unit, cluster.devices_per_node))
    else:
        other_ranks = cluster.nodes * cluster.devices_per_node - free
        filling = (-(-(unit + other_ranks) // cluster.devices_per_node),)
    yield from ({"cluster.nodes": nodes} for nodes in filling)
    if free >= unit:
        yield {"cluster.allow_idle_devices": True}


def _origins(others: Iterable[RoleGroup], sources: Mapping[str, Source]) -> str:
    """Where each term was set, as far as that is known."""
    paths = {axis: f"parallel.{axis}" for axis in ("dp", "tp", "pp")}
    paths |= {f"{role.name}s": role.sized_by for role in others if role.sized_by}
    known = [f"{name} from {sources[path].where}" for name, path in paths.items() if path in sources]
    return f" ({', '.join(known)})" if known else ""
