"""No server: the ranks that train own the parameters and agree on gradients among themselves.

reduce          one bucket of N bytes, L replicas on each of the nodes     sent by a rank
flat            all-reduce over all n replicas                             2 (n-1)/n N, slowest link
hierarchical    reduce-scatter inside each node                            (L-1)/L N, inside
                all-reduce of every L-th part between the nodes            2 (n/L - 1)/(n/L) N/L, between
                all-gather inside each node                                (L-1)/L N, inside
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from launcher.contract.mesh import Cluster
from launcher.contract.plan import Plan
from launcher.contract.strategy import Architecture, Collective, Fault, JobShape, RankCost
from launcher_plugins.parallel.data.plan import buckets, summed_gradients

_PATH = "architecture.reduce"


@dataclass(frozen=True, kw_only=True)
class DecentralizedConfig:
    """Settings of the architecture."""

    reduce: Literal["flat", "hierarchical"] = "flat"
    """How gradients are summed. ``flat``: one all-reduce over all replicas; ``hierarchical``: inside each
    node first, then between the nodes, so that slow links carry each sum once."""


class Decentralized(Architecture):
    """Synchronous training; every replica applies the same update to the same parameters."""

    runtime = "launcher_plugins.architectures.decentralized.runtime:update"
    exact = True
    takes_back = True
    Config = DecentralizedConfig

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Every mesh can train this way; not every one has two levels of links."""
        if job.config.architecture.settings(DecentralizedConfig).reduce == "hierarchical":
            yield from _hierarchy_faults(job)

    def cost(self, job: JobShape, pp_rank: int) -> RankCost:
        """The gradients, in buckets."""
        if job.config.architecture.settings(DecentralizedConfig).reduce == "flat":
            return RankCost(collectives=summed_gradients(job, pp_rank))
        num_local, *_ = ranks_on_nodes(job.cluster, job.mesh.group("dp", 0))
        size, count = buckets(job, pp_rank)
        return RankCost(
            # One bucket's part at a time; the next one's is on its way.
            memory_bytes={"reduced parts": 2 * -(-size // num_local)},
            collectives=_levels(job, num_local, size, count),
        )

    def layout(self, plan: Plan) -> Iterable[str]:
        """Nothing, where gradients are summed as by any other launcher."""
        reduce = plan.config.architecture.settings(DecentralizedConfig).reduce
        return () if reduce == "flat" else (f"reduce={reduce}",)


def ranks_on_nodes(cluster: Cluster, ranks: Iterable[int]) -> tuple[int, ...]:
    """How many of some ranks each node holds that holds any."""
    return tuple(Counter(map(cluster.node, ranks)).values())


def _hierarchy_faults(job: JobShape) -> Iterator[Fault]:
    """Jobs in which two levels would be one."""
    mesh, cluster = job.mesh, job.cluster.config
    held = sorted({ranks_on_nodes(job.cluster, group) for group in mesh.groups("dp")})
    if job.config.parallel.zero_stage:
        reason = "DeepSpeed exchanges the gradients of ZeRO itself"
    elif mesh.dp == 1:
        reason = "there is one replica (parallel.dp=1), which sums with nobody"
    elif any(len(nodes) == 1 for nodes in held):
        where = "the cluster has one node" if cluster.nodes == 1 else "the replicas of a group share one node"
        reason = f"{where}, so there is nothing between nodes"
    elif any(max(nodes) == 1 for nodes in held):
        reason = (
            f"each of the {mesh.dp} replicas of a group is on a node of its own ({cluster.devices_per_node} "
            "devices, taken by tp and pp), so there is nothing inside a node"
        )
    elif any(len(set(nodes)) > 1 for nodes in held):
        uneven = next(nodes for nodes in held if len(set(nodes)) > 1)
        reason = f"a group has {' and '.join(map(str, uneven))} replicas on its nodes, which must be as many"
    else:
        return
    rule = f"sums inside each node and then between nodes; {reason}"
    yield Fault(_PATH, "hierarchical", rule, ways=({_PATH: "flat"},))


def _levels(job: JobShape, num_local: int, size: int, count: int) -> tuple[Collective, ...]:
    """The three messages of a bucket."""
    summed = partial(Collective, axis="dp", count=count, overlappable=True)
    inside = partial(
        summed, purpose="gradients in a node", num_bytes=size, group_size=num_local, link="intra_node"
    )
    between = summed(
        operation="all_reduce",
        purpose="gradients between nodes",
        num_bytes=-(-size // num_local),
        group_size=job.mesh.dp // num_local,
        link="inter_node",
    )
    levels = inside(operation="reduce_scatter"), between, inside(operation="all_gather")
    return levels if count else ()
