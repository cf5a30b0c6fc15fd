"""Which ranks form the groups that are measured, so that each uses one link of the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.base.errors import LauncherError
from launcher.base.units import counted
from launcher.contract.bench import Placement
from launcher.contract.config import ClusterConfig


def default_sizes(cluster: ClusterConfig, num_cores: int | None) -> tuple[int, ...]:
    """The default group sizes: powers of two inside a node; one rank of each node; all ranks.

    ``num_cores``: of a machine on which ranks are processes, so that no two share a core."""
    limit = cluster.devices_per_node if num_cores is None else min(cluster.devices_per_node, num_cores)
    limit = max(limit, 2)
    sizes = {2**power for power in range(1, limit.bit_length()) if 2**power <= cluster.devices_per_node}
    if cluster.nodes > 1:
        sizes |= {cluster.nodes, cluster.nodes * cluster.devices_per_node}
    return tuple(sorted(sizes))


def world_size(cluster: ClusterConfig, sizes: Sequence[int]) -> int:
    """Ranks to start: with several nodes all of them, so that the ranks are placed as the cluster says."""
    return cluster.nodes * cluster.devices_per_node if cluster.nodes > 1 else max(sizes)


def placements(cluster: ClusterConfig, sizes: Sequence[int]) -> tuple[Placement, ...]:
    """For every size a group inside the first node, and groups that fill all nodes evenly.

    Groups across nodes run at the same time, as in training, so that each device has its share of its
    node's network.

    >>> from launcher.contract.config import LinkConfig
    >>> link = LinkConfig(latency_s=0.0, bandwidth_bytes_per_s=1.0)
    >>> two = ClusterConfig(name="", nodes=2, devices_per_node=2, intra_node=link, inter_node=link,
    ...                     allow_idle_devices=True)
    >>> [(found.link, found.groups) for found in placements(two, [2, 4])]
    [('intra_node', ((0, 1),)), ('inter_node', ((0, 2), (1, 3))), ('inter_node', ((0, 1, 2, 3),))]

    Raises:
        LauncherError: for a size that neither fits in a node nor fills all nodes evenly.
    """
    found = [placement for size in sizes for placement in _of_size(cluster, size)]
    return tuple(sorted(found, key=lambda placement: placement.link != "intra_node"))


def _of_size(cluster: ClusterConfig, size: int) -> Iterator[Placement]:
    nodes, devices = cluster.nodes, cluster.devices_per_node
    has_inside = 2 <= size <= devices
    per_node, rest = divmod(size, nodes)
    has_across = nodes > 1 and rest == 0 and 1 <= per_node <= devices
    if not (has_inside or has_across):
        ways = f"from 2 to {devices}" if devices > 1 else ""
        if nodes > 1:
            ways += f"{' inside a node, or ' if ways else ''}a multiple of {nodes} up to {nodes * devices}"
        machines = f"{counted(nodes, 'node')} of {counted(devices, 'device')}"
        raise LauncherError(
            f"--ranks {size}: the cluster has {machines}. Give {ways}, or set cluster.devices_per_node."
        )
    if has_inside:
        yield Placement(link="intra_node", groups=(tuple(range(size)),))
    if has_across:
        groups = tuple(
            tuple(node * devices + first + local for node in range(nodes) for local in range(per_node))
            for first in range(0, devices - per_node + 1, per_node)
        )
        yield Placement(link="inter_node", groups=groups)
