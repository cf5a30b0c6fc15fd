"""AdamW's moments split over the data-parallel replicas by torch's ZeroRedundancyOptimizer.

    replica 0    F B F B | gradients summed | updates its parameters     | broadcasts them
    replica 1    F B F B | gradients summed | updates the other ones     | broadcasts them

Gradients are summed by plain data parallelism, beside which this plugin applies. Each replica keeps the
moments of the parameters that it updates, whole tensors of about as many elements on each.

Source: Rajbhandari et al., ZeRO (2020), section 5.1 (there: the first stage).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from launcher.base.units import format_bytes
from launcher.contract.config import DEFAULT_ARCHITECTURE
from launcher.contract.plan import Plan
from launcher.contract.strategy import Collective, Fault, JobShape, ModelStates, Parallel, RankCost, Section

NAME = "sharded_adamw"


@dataclass(frozen=True, kw_only=True)
class ShardedConfig:
    """Settings of the plugin."""

    bucket_view: bool = False
    """Whether the parameters of a replica lie in one tensor, which is sent in one message."""


class ShardedAdamW(Parallel):
    """Replicas that each update a part of the parameters."""

    axis = "dp"
    runtime = "trireme_example_parallel_runtime:apply"
    update = "trireme_example_parallel_runtime:update"
    Config = ShardedConfig

    def check(self, job: JobShape) -> Iterable[Fault]:
        """What it was not made for."""
        path, precision = f"parallel.plugins.{NAME}", job.config.precision
        if precision.compute != "fp32":
            rule = f"splits the moments of fp32 weights, and precision.compute is {precision.compute}"
            yield Fault(path, "{}", rule, ways=({"precision.compute": "fp32"},))
        if job.config.optim.name != "adamw":
            rule = f"splits AdamW's moments, and optim.name is {job.config.optim.name}"
            fix = "Leave it out, or set optim=adamw."
            yield Fault(path, "{}", rule, fix, ways=({"optim": "adamw"},))
        if job.config.architecture.name != DEFAULT_ARCHITECTURE:
            rule = f"the update is {job.config.architecture.name}'s own"
            yield Fault(path, "{}", rule, ways=({"architecture.name": DEFAULT_ARCHITECTURE},))

    def cost(self, job: JobShape, pp_rank: int) -> RankCost:
        """A part of the optimizer state, and the broadcasts of the updated parameters."""
        states = split_states(job, pp_rank)
        message = Collective(
            operation="broadcast",
            purpose="updated weights",
            axis="dp",
            num_bytes=-(-states.weights_bytes // job.mesh.dp),
            count=job.mesh.dp,
            overlappable=False,
        )
        return RankCost(states=states, collectives=(message,))

    def describe(self, job: JobShape) -> Iterable[Section]:
        """What a rank no longer holds."""
        whole, split = job.unsharded_states(0), split_states(job, 0)
        sizes = [format_bytes(states.optimizer_bytes) for states in (split, whole)]
        line = f"{sizes[0]} on pp_rank 0 in place of {sizes[1]}, over dp = {job.mesh.dp}"
        yield Section(plugin=NAME, title="Optimizer state per rank", lines=(line,), about="memory")

    def layout(self, plan: Plan) -> Iterable[str]:
        """Its name."""
        yield NAME


def split_states(job: JobShape, pp_rank: int) -> ModelStates:
    """Whole weights and gradients, and a part of the moments."""
    whole = job.unsharded_states(pp_rank)
    part = -(-whole.optimizer_bytes // job.mesh.dp)
    return replace(
        whole, optimizer_bytes=part, saved_bytes=-(-whole.saved_bytes // job.mesh.dp), is_sharded=True
    )
