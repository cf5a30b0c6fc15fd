"""world = dp * tp * pp trainer ranks plus the other roles' ranks, one on each device."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from launcher.config.schema import LaunchConfig
from launcher.errors import Fault
from launcher.plan.arithmetic import divisors, listed, nearest_of
from launcher.topology.mesh import AXES
from launcher.typed import Source


def solve_dp(config: LaunchConfig, num_other_ranks: int) -> int | Fault:
    """Data-parallel replicas: as given, or for ``auto`` as many as the devices hold."""
    parallel, free = config.parallel, _free_devices(config, num_other_ranks)
    if parallel.dp != "auto":
        return parallel.dp
    unit = parallel.tp * parallel.pp
    if free >= unit and (free % unit == 0 or config.cluster.allow_idle_devices):
        return free // unit
    rule = f"dp = devices / (tp * pp) = {free} / ({parallel.tp} * {parallel.pp}) = {free / unit:.3g}"
    ways = [_smaller_model_split(config, free)]
    if free < unit:
        rule += " is below 1"
        ways += _more_nodes(config, unit + num_other_ranks)
    else:
        rule += f" is not whole: tp * pp = {unit} must divide {free} ({listed(divisors(free))})"
        ways.append("cluster.allow_idle_devices=true")
    return Fault("parallel.dp", "auto", rule, f"Set {', or '.join(ways)}.")


def world_faults(
    config: LaunchConfig, dp: int, num_other_ranks: int, sources: Mapping[str, Source]
) -> tuple[Fault, ...]:
    """Faults of a world that has not one rank for each device."""
    cluster, parallel = config.cluster, config.parallel
    devices, unit = cluster.nodes * cluster.devices_per_node, parallel.tp * parallel.pp
    world = dp * unit + num_other_ranks
    if world == devices or (world < devices and cluster.allow_idle_devices):
        return ()
    free = devices - num_other_ranks
    ways = []
    if free >= unit and (free % unit == 0 or cluster.allow_idle_devices):
        ways.append(f"parallel.dp={free // unit} (or auto)")
    else:
        ways.append(_smaller_model_split(config, free))
    ways += _more_nodes(config, world)
    if world < devices:
        ways.append("cluster.allow_idle_devices=true")
        verdict = f"{devices - world} would stay idle"
    else:
        verdict = "which is too few; dp counts whole replicas, each of tp * pp ranks"
    others = f" + {num_other_ranks} of other roles" if num_other_ranks else ""
    rule = (
        f"world = dp * tp * pp{others} = {dp} * {parallel.tp} * {parallel.pp}{others} = {world} ranks"
        f"{_origins(sources)}, the cluster has nodes * devices_per_node = "
        f"{cluster.nodes} * {cluster.devices_per_node} = {devices} devices: {verdict}"
    )
    return (Fault("parallel.dp", dp, rule, f"Set {', or '.join(ways)}."),)


def rank_order_faults(rank_order: str) -> tuple[Fault, ...]:
    """Faults of an order that does not name every axis once."""
    if sorted(axes(rank_order)) == sorted(AXES):
        return ()
    rule = f"must name each of {', '.join(AXES)} once, the outermost first"
    return (Fault("parallel.rank_order", rank_order, rule, f"Set parallel.rank_order={'-'.join(AXES)}."),)


def axes(rank_order: str) -> tuple[str, ...]:
    """The axes that an order names.

    >>> axes("pp-dp-tp")
    ('pp', 'dp', 'tp')
    """
    return tuple(rank_order.split("-"))


def _free_devices(config: LaunchConfig, num_other_ranks: int) -> int:
    return config.cluster.nodes * config.cluster.devices_per_node - num_other_ranks


def _smaller_model_split(config: LaunchConfig, free: int) -> str:
    """A tp and pp whose product divides the devices, with as little changed as possible."""
    parallel = config.parallel
    tp = parallel.tp if free % parallel.tp == 0 else gcd(free, parallel.tp)
    pp = nearest_of(parallel.pp, divisors(max(free, 1) // max(tp, 1)) or (1,))
    words = [f"parallel.tp={tp}"] * (tp != parallel.tp) + [f"parallel.pp={pp}"] * (pp != parallel.pp)
    return " ".join(words)


def _more_nodes(config: LaunchConfig, world: int) -> list[str]:
    """The number of nodes that the world fills, when it fills any."""
    nodes, over = divmod(world, config.cluster.devices_per_node)
    if over and not config.cluster.allow_idle_devices:
        return []
    return [f"cluster.nodes={nodes + (over > 0)}"]


def _origins(sources: Mapping[str, Source]) -> str:
    """Where each factor was set, as far as that is known."""
    places = {axis: sources.get(f"parallel.{axis}") for axis in ("dp", "tp", "pp")}
    known = [f"{axis} from {source.where}" for axis, source in places.items() if source]
    return f" ({', '.join(known)})" if known else ""
