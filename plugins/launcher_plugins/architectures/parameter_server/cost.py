"""What an exchange with parameter servers takes, beside the all-reduce that it stands in for.

n workers with links of B bytes a second, k servers, M bytes of parameters:

    all-reduce on a ring                   2 (n-1)/n M/B
    servers, push and pull at once         max(M/B, n M/(k B))     the servers' links bound it when k < n
    servers, pull after push               twice that              a norm, or a whole update, comes between
    a server on each worker's machine      2 (n-1)/n M/B           as an all-reduce: no part goes to itself
    both, each link as busy as the others  2 n (n-1) M / ((n^2 + k n - 2 k) B)          the least there is

Of the two last the first is the second without servers of their own; neither is built.

Links work in both directions at once, and a latency is counted for every bucket.

Source: Jiang et al., A Unified Architecture for Accelerating Distributed DNN Training (2020), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from launcher.base.units import counted, format_duration
from launcher.contract.config import LinkConfig
from launcher.contract.strategy import (
    DTYPE_BYTES,
    FP32_BYTES,
    Collective,
    JobShape,
    RankCost,
    Section,
    StepOverlap,
)
from launcher_plugins.architectures.parameter_server.config import SERVER, ParameterServerConfig, settings_of
from launcher_plugins.parallel.data.plan import buckets

_PASSES = 2
"""Times that an update moves the state: one read, one write."""
_NUM_SUMS, _SUM_BYTES = 2, 8
"""The loss and the count of its targets, which the first server adds up."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A worker's exchange of one step."""

    num_workers: int
    num_servers: int
    num_buckets: int
    push_bytes: float
    """Gradients of a worker as they are sent."""
    pull_bytes: float
    link: LinkConfig
    update_s: float
    """What a server works on one update."""
    is_lockstep: bool
    pulls_last: bool
    """Whether nothing can be pulled before all is pushed."""
    overlaps: bool

    @property
    def contention(self) -> float:
        """How many times longer a byte takes when all workers send at once.

        Workers on their own seldom do; `in_step` then counts how much the servers can take in.
        """
        return max(1.0, self.num_workers / self.num_servers) if self.is_lockstep else 1.0

    @property
    def push_s(self) -> float:
        """Until all gradients are there, the backward left out."""
        return self._one_way_s(self.push_bytes)

    @property
    def pull_s(self) -> float:
        """Until all parameters are there."""
        return self._one_way_s(self.pull_bytes)

    @property
    def total_s(self) -> float:
        """Both ways, with nothing to hide them and no work on the servers."""
        return self.push_s + self.pull_s if self.pulls_last else max(self.push_s, self.pull_s)

    @property
    def mixed_s(self) -> float:
        """Both ways, if the workers' machines held a part as well, as large as keeps all links busy.

        Four workers and two servers, 1.2 times what one copy takes over a link; without servers 1.5 times,
        as an all-reduce.
        """
        workers, servers = self.num_workers, self.num_servers
        factor = 2 * workers * (workers - 1) / (workers**2 + servers * workers - 2 * servers)
        latency_s = self.num_buckets * self.link.latency_s
        num_bytes = max(self.push_bytes, self.pull_bytes)
        return latency_s + factor * num_bytes / self.link.bandwidth_bytes_per_s

    @property
    def in_step(self) -> StepOverlap:
        """What of it goes beside the computation of a step, and what does not."""
        push_s, pull_s, count = self.push_s, self.pull_s, self.num_buckets
        waited_s = self.update_s
        if not self.pulls_last:  # the pull goes beside the push, one bucket behind
            push_s, pull_s = max(push_s, pull_s), 0.0
            waited_s = (self.update_s + min(self.push_s, self.pull_s)) / count
        if not self.overlaps:
            waited_s, push_s, pull_s = waited_s + push_s + pull_s, 0.0, 0.0
        if self.is_lockstep:
            waited_s, busiest_s = waited_s + 2 * self.link.latency_s, 0.0
        else:
            share = self.num_workers / self.num_servers / self.link.bandwidth_bytes_per_s
            bytes_s = share * max(self.push_bytes, self.pull_bytes)
            busiest_s = max(bytes_s, self.num_workers * self.update_s)
        return StepOverlap(
            num_buckets=count, backward_s=push_s, forward_s=pull_s, waited_s=waited_s, busiest_s=busiest_s
        )

    def _one_way_s(self, num_bytes: float) -> float:
        latency_s = self.num_buckets * self.link.latency_s
        return latency_s + self.contention * num_bytes / self.link.bandwidth_bytes_per_s


def exchange_of(job: JobShape) -> Exchange:
    """The exchange of a job."""
    settings, num_workers = settings_of(job.config), job.mesh.num_ranks
    num_parameters = job.num_trained_parameters(0)
    num_gradients = num_workers if settings.is_lockstep else 1
    moved = num_gradients * packed_bytes(job) + _PASSES * state_bytes(job) + FP32_BYTES
    share = num_parameters / settings.servers
    return Exchange(
        num_workers=num_workers,
        num_servers=settings.servers,
        num_buckets=max(1, buckets(job, 0)[1]),
        push_bytes=num_parameters * packed_bytes(job),
        pull_bytes=num_parameters * job.compute_bytes,
        link=_link(job, settings),
        update_s=share * moved / job.config.device.memory_bandwidth_bytes_per_s,
        is_lockstep=settings.is_lockstep,
        pulls_last=job.config.optim.clip_norm is not None or not settings.is_lockstep,
        overlaps=settings.overlap,
    )


def packed_bytes(job: JobShape) -> float:
    """Bytes of one pushed gradient."""
    settings = settings_of(job.config)
    if settings.compression == "bf16":
        return DTYPE_BYTES["bf16"]
    if settings.compression == "top_k":
        return (settings.top_k_fraction or 0.0) * 2 * FP32_BYTES  # an index and a value
    return job.gradient_bytes


def state_bytes(job: JobShape) -> int:
    """Bytes of a parameter on its server: the master weight, the optimizer's states, and the gradient of an
    update."""
    precision = job.config.precision
    master = FP32_BYTES if precision.master_weights else job.compute_bytes
    return (2 + job.states_per_parameter) * master


def server_bytes(job: JobShape) -> int:
    """Bytes that a server holds at most: its part of the state, every worker's gradients, and what is on its
    way to them; on the first server also the weights that are not trained."""
    settings, num_workers = settings_of(job.config), job.mesh.num_ranks
    copies = 0 if settings.is_lockstep else num_workers * job.compute_bytes
    each = state_bytes(job) + num_workers * packed_bytes(job) + copies
    num_trained = job.model.num_trained_parameters
    frozen = (job.model.num_parameters - num_trained) * job.compute_bytes
    return -(-round(num_trained * each) // settings.servers) + frozen


def worker_cost(job: JobShape) -> RankCost:
    """Memory and messages of a worker."""
    exchange, settings = exchange_of(job), settings_of(job.config)
    num_parameters = job.num_trained_parameters(0)
    left_out = {} if settings.compression == "none" else {"gradients left out": num_parameters * FP32_BYTES}
    return RankCost(
        persistent_bytes=left_out,
        collectives=tuple(_messages(exchange)),
        states=replace(job.unsharded_states(0), optimizer_bytes=0),
        overlap=exchange.in_step,
    )


def compare(job: JobShape) -> dict[str, Any]:
    """The exchange beside an all-reduce of the same gradients over the same links, both in seconds.

    push_s, pull_s   all gradients, all parameters of a worker while all workers send, nothing hidden
    total_s          both ways, with no work on the servers
    all_reduce_s     all gradients in a ring over the workers
    even_servers     from how many on ``total_s`` is no longer than that; None: however many
    update_s         work of a server on one update
    mixed_s          ``total_s`` if the workers' machines held a part as well; None where that is no faster
    """
    exchange, num_workers = exchange_of(job), job.mesh.num_ranks
    ring = 2 * (num_workers - 1)
    num_bytes = job.num_trained_parameters(0) * job.gradient_bytes
    all_reduce_s = (
        ring * exchange.num_buckets * exchange.link.latency_s
        + ring / num_workers * num_bytes / exchange.link.bandwidth_bytes_per_s
    )
    in_lockstep = replace(exchange, is_lockstep=True)
    even = (
        count
        for count in range(1, num_workers + 1)
        if replace(in_lockstep, num_servers=count).total_s <= all_reduce_s
    )
    return {
        "num_servers": exchange.num_servers,
        "push_s": in_lockstep.push_s,
        "pull_s": in_lockstep.pull_s,
        "total_s": in_lockstep.total_s,
        "all_reduce_s": all_reduce_s,
        "even_servers": next(even, None),
        "pulls_last": exchange.pulls_last,
        "update_s": exchange.update_s,
        "mixed_s": in_lockstep.mixed_s if exchange.num_servers < num_workers else None,
    }


def section(job: JobShape, name: str) -> Section:
    """The comparison as the plan of a job shows it; ``name``: the plugin's."""
    found, title = compare(job), "Exchange with the servers, of all workers at once"
    return Section(plugin=name, title=title, lines=tuple(_compared(found, job.mesh.num_ranks)), values=found)


def _compared(found: Mapping[str, Any], num_workers: int) -> list[str]:
    how = "one after the other" if found["pulls_last"] else "at once"
    times = ("push_s", "pull_s", "total_s", "all_reduce_s", "update_s")
    push, pull, total, ring, update = (format_duration(found[name]) for name in times)
    bound = "the servers' links" if found["num_servers"] < num_workers else "each worker's link"
    if found["even_servers"] is None:
        even = f"however many servers, an all-reduce is faster: {how}, both ways take longer than a ring"
    else:
        even = f"as fast as an all-reduce from {counted(found['even_servers'], 'server')} on"
    mixed = []
    if found["mixed_s"] is not None and not found["pulls_last"]:
        least = format_duration(found["mixed_s"])
        mixed = [f"with parts on the workers' machines as well, which is not built: {least} at the least"]
    return [
        f"push {push}, pull {pull}, {how}: {total}, bound by {bound}",
        f"the same gradients in an all-reduce over the {num_workers} workers: {ring}",
        even,
        *mixed,
        f"a server works {update} on each update",
    ]


def _link(job: JobShape, settings: ParameterServerConfig) -> LinkConfig:
    """The slowest link between a worker and a server."""
    cluster = job.cluster.config
    world_size = job.mesh.num_ranks + settings.servers
    is_apart = world_size > cluster.devices_per_node or SERVER in job.config.site.roles
    return cluster.inter_node if is_apart else cluster.intra_node


def _messages(exchange: Exchange) -> Iterator[Collective]:
    """Every bucket to its servers and back, and in lock-step the sums of the loss."""
    count = exchange.num_buckets
    moved = partial(
        Collective, axis="dp", count=count, overlappable=exchange.overlaps, contention=exchange.contention
    )
    yield moved(operation="push", purpose="gradients", num_bytes=round(exchange.push_bytes / count))
    yield moved(operation="pull", purpose="parameters", num_bytes=round(exchange.pull_bytes / count))
    if exchange.is_lockstep:
        sums = partial(Collective, operation="push", purpose="loss and targets", axis="dp")
        yield sums(num_bytes=_SUM_BYTES, count=_NUM_SUMS, overlappable=True)
