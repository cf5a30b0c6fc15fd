"""Pipeline parallelism: every rank holds some consecutive layers and passes activations on.

    stage 0 --activations--> stage 1 --activations--> stage 2   (loss)
            <--gradients----         <--gradients----

In which order a rank works is the schedule's business. What is sent depends on the stages alone:
one message each way for each microbatch and each boundary between stages of different ranks, but no gradient
down to a stage that nothing is trained up to.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from launcher.contract.strategy import FP32_BYTES, Collective, JobShape, Parallel, RankCost, StagePlan


class PipelineParallel(Parallel):
    """Stages on the ranks of the ``pp`` axis."""

    axis = "pp"
    runtime = "launcher_plugins.parallel.pipeline.runtime:apply"

    def cost(self, job: JobShape, pp_rank: int) -> RankCost:
        """Messages to the next and to the previous stage, and what the ends of the model share."""
        collectives: list[Collective] = []
        last = len(job.stages) - 1
        for stage in job.stages_of(pp_rank):
            if stage.stage < last:
                collectives.append(_message(job, "activations", stage, "forward"))
            if stage.stage > 0 and not (before := job.stages[stage.stage - 1]).is_frozen:
                collectives.append(_message(job, "activation gradients", before, "backward"))
        summed = partial(Collective, operation="all_reduce", axis="pp")
        holds_end = any(stage.stage in (0, last) for stage in job.stages_of(pp_rank))
        if job.model.num_tied_parameters and holds_end:
            size = -(-job.model.num_tied_parameters // job.mesh.tp) * job.gradient_bytes
            collectives.append(summed(purpose="tied embedding gradients", num_bytes=size, group_size=2))
        num_members = job.mesh.pp * job.mesh.tp
        collectives.append(summed(purpose="gradient norm", num_bytes=FP32_BYTES, group_size=num_members))
        return RankCost(collectives=tuple(collectives))


def _message(
    job: JobShape, purpose: str, below: StagePlan, phase: Literal["forward", "backward"]
) -> Collective:
    """All messages of a step over the boundary above a stage in one direction."""
    return Collective(
        operation="send_recv",
        purpose=purpose,
        axis="pp",
        num_bytes=job.local_activation_bytes(job.layers(below)[-1].output_elements),
        count=job.pipeline.num_microbatches,
        overlappable=True,
        phase=phase,
    )
