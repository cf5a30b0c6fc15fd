"""Data parallelism: every replica trains on its own samples; gradients are summed over the replicas.

replica 0   F B F B | sum over dp, bucket by bucket while the last B runs | update
replica 1   F B F B | sum over dp                                         | update
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.interfaces import Collective, Fault, JobShape, RankCost

_SCALAR_BYTES = 8


class DataParallel:
    """Replicas of the whole model."""

    axis = "dp"
    runtime = "launcher_plugins.parallel.data_runtime:apply"

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Every job has replicas of equal work, once its batch sizes are solved."""
        return ()

    def cost(self, job: JobShape, pp_rank: int, tp_rank: int) -> RankCost:
        """All gradients in buckets, and on the last stage the loss and the count of its targets."""
        collectives = []
        if total := job.num_local_parameters(pp_rank) * job.gradient_bytes:
            num_buckets = -(-total // job.config.parallel.bucket_bytes)
            size = -(-total // num_buckets)
            collectives.append(_sum("gradients", size, num_buckets, overlappable=True))
        return RankCost(collectives=(*collectives, *loss_messages(job, pp_rank)))


def loss_messages(job: JobShape, pp_rank: int) -> tuple[Collective, ...]:
    """On the last stage: the loss, and the count of its targets."""
    if job.stages[-1].pp_rank != pp_rank:
        return ()
    return (_sum("loss and targets", _SCALAR_BYTES, 2, overlappable=False),)


def _sum(purpose: str, num_bytes: int, count: int, *, overlappable: bool) -> Collective:
    return Collective(
        operation="all_reduce",
        purpose=purpose,
        axis="dp",
        num_bytes=num_bytes,
        count=count,
        overlappable=overlappable,
    )
