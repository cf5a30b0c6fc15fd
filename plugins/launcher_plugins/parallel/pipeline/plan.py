"""Pipeline parallelism: every rank holds some consecutive layers and passes activations on.

    stage 0 --activations--> stage 1 --activations--> stage 2   (loss)
            <--gradients----         <--gradients----

In which order a rank works is the schedule's business. What is sent depends on the stages alone:
one message each way for each microbatch and each boundary between stages of different ranks.
"""

from __future__ import annotations

from typing import Literal

from launcher.contract.strategy import (
    FP32_BYTES,
    Collective,
    JobShape,
    LayerShape,
    Parallel,
    RankCost,
    StagePlan,
)


class PipelineParallel(Parallel):
    """Stages on the ranks of the ``pp`` axis."""

    axis = "pp"
    runtime = "launcher_plugins.parallel.pipeline.runtime:apply"

    def cost(self, job: JobShape, pp_rank: int, tp_rank: int) -> RankCost:
        """Messages to the next and to the previous stage, and what the ends of the model share."""
        collectives: list[Collective] = []
        last = len(job.stages) - 1
        for stage in job.stages_of(pp_rank):
            if stage.stage < last:
                collectives.append(_message(job, "activations", _output(job, stage), "forward"))
            if stage.stage > 0:
                before = job.stages[stage.stage - 1]
                collectives.append(_message(job, "activation gradients", _output(job, before), "backward"))
        holds_end = any(stage.stage in (0, last) for stage in job.stages_of(pp_rank))
        if job.model.num_tied_parameters and holds_end:
            size = -(-job.model.num_tied_parameters // job.mesh.tp) * job.gradient_bytes
            collectives.append(_sum("tied embedding gradients", size, group_size=2))
        collectives.append(_sum("gradient norm", FP32_BYTES, group_size=job.mesh.pp * job.mesh.tp))
        return RankCost(collectives=tuple(collectives))


def _output(job: JobShape, stage: StagePlan) -> LayerShape:
    return job.layers(stage)[-1]


def _message(
    job: JobShape, purpose: str, layer: LayerShape, phase: Literal["forward", "backward"]
) -> Collective:
    """All messages of a step over one boundary in one direction."""
    return Collective(
        operation="send_recv",
        purpose=purpose,
        axis="pp",
        num_bytes=job.local_activation_bytes(layer.output_elements),
        count=job.pipeline.num_microbatches,
        overlappable=True,
        phase=phase,
    )


def _sum(purpose: str, num_bytes: int, group_size: int) -> Collective:
    """One sum at the end of the step."""
    return Collective(
        operation="all_reduce",
        purpose=purpose,
        axis="pp",
        num_bytes=num_bytes,
        count=1,
        overlappable=False,
        group_size=group_size,
    )
