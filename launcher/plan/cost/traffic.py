"""What the ranks send during one step, and how long each kind of message takes.

Collectives are counted as rings, by the table of `ring_share`: a message takes steps * latency + share of the
buffer / bandwidth of the group's slowest link. The share of a pull is received, not sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from launcher.base.arithmetic import ring_share, ring_steps
from launcher.contract.config import LinkConfig
from launcher.contract.plan import TrafficPlan
from launcher.contract.strategy import Collective, JobShape, Parallel, RankCost


def rank_costs(job: JobShape, parallels: Sequence[Parallel]) -> tuple[tuple[RankCost, ...], ...]:
    """For every pp_rank what each parallel plugin adds on its ranks."""
    pp_ranks = range(job.pipeline.num_pp_ranks)
    return tuple(tuple(parallel.cost(job, pp_rank) for parallel in parallels) for pp_rank in pp_ranks)


def plan_traffic(job: JobShape, costs: Sequence[Sequence[RankCost]]) -> tuple[TrafficPlan, ...]:
    """One row for each kind of message on each pp_rank; equal messages of its stages are one row."""
    rows = []
    for pp_rank, rank in enumerate(costs):
        counts: Counter[Collective] = Counter()
        for cost in rank:
            for collective in cost.collectives:
                counts[replace(collective, count=1, phase="step")] += collective.count
        rows += [_row(job, pp_rank, replace(message, count=count)) for message, count in counts.items()]
    return tuple(rows)


def collective_time_s(job: JobShape, collective: Collective) -> float:
    """Seconds that all of a step's messages of one kind take, one after the other."""
    link: LinkConfig = job.cluster.link(job.mesh, collective.axis)
    if collective.link:
        link = getattr(job.cluster.config, collective.link)
    return collective.count * message_time_s(job, collective, link)


def message_time_s(job: JobShape, collective: Collective, link: LinkConfig) -> float:
    """Seconds of one message over a given link."""
    members = group_size(job, collective)
    sent = ring_share(collective.operation, members) * collective.num_bytes
    moved_s = collective.contention * sent / link.bandwidth_bytes_per_s
    return ring_steps(collective.operation, members) * link.latency_s + moved_s


def group_size(job: JobShape, collective: Collective) -> int:
    """Ranks that take part in a message."""
    return collective.group_size or job.mesh.size(collective.axis)


def _row(job: JobShape, pp_rank: int, collective: Collective) -> TrafficPlan:
    sent = ring_share(collective.operation, group_size(job, collective)) * collective.num_bytes
    return TrafficPlan(
        pp_rank=pp_rank,
        purpose=collective.purpose,
        operation=collective.operation,
        axis=collective.axis,
        message_bytes=collective.num_bytes,
        count=collective.count,
        sent_bytes=round(collective.count * sent),
        time_s=collective_time_s(job, collective),
        overlappable=collective.overlappable,
    )
