"""Data parallelism: every replica trains on its own samples; gradients are summed over the replicas.

replica 0   F B F B | sum over dp, bucket by bucket while the last B runs | update
replica 1   F B F B | sum over dp                                         | update
"""

from __future__ import annotations

from dataclasses import replace

from launcher.base import registry
from launcher.contract.strategy import Architecture, Collective, JobShape, Parallel, RankCost

_SCALAR_BYTES = 8


class DataParallel(Parallel):
    """Replicas of the whole model."""

    axis = "dp"
    runtime = "launcher_plugins.parallel.data.runtime:apply"

    def cost(self, job: JobShape, pp_rank: int) -> RankCost:
        """What the architecture's replicas exchange, and on the last stage the loss and the count of its
        targets."""
        architecture = registry.load(Architecture, job.config.architecture.name)
        own = architecture.cost(job, pp_rank) or RankCost(collectives=summed_gradients(job, pp_rank))
        if own.overlap is not None:  # there is no all-reduce
            return own
        return replace(own, collectives=(*own.collectives, *loss_messages(job, pp_rank)))


def summed_gradients(job: JobShape, pp_rank: int) -> tuple[Collective, ...]:
    """All gradients of a rank, summed over the replicas in buckets."""
    size, count = buckets(job, pp_rank)
    each = Collective(
        operation="all_reduce", purpose="gradients", axis="dp", num_bytes=size, count=count, overlappable=True
    )
    return (each,) if count else ()


def buckets(job: JobShape, pp_rank: int) -> tuple[int, int]:
    """Bytes of one bucket of a rank's gradients, and how many there are."""
    total = job.num_trained_parameters(pp_rank) * job.gradient_bytes
    count = -(-total // job.config.parallel.bucket_bytes)
    return -(-total // count) if count else 0, count


def loss_messages(job: JobShape, pp_rank: int) -> tuple[Collective, ...]:
    """On the last stage: the loss, and the count of its targets, which work goes on beside."""
    if job.stages[-1].pp_rank != pp_rank:
        return ()
    each = Collective(
        operation="all_reduce",
        purpose="loss and targets",
        axis="dp",
        num_bytes=_SCALAR_BYTES,
        count=2,
        overlappable=True,
        phase="begin",
    )
    return (each,)
