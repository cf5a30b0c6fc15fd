"""Parameter servers: ranks that hold the parameters, and update them with what the workers push.

    worker   forward, backward | push gradients, bucket by bucket | pull parameters, first layer first
    server   sum or take each  | clip, AdamW on its key range     | send

Workers are the trainer ranks 0 .. n-1, each with the whole model and its own samples; servers follow them.
Every bucket of the flattened parameters is cut into as many key ranges as there are servers, equal to one
element, so that all servers hold, receive and send the same.

    sync      one update a step, with the sum over all workers: what one device computes
    bounded   an update for every worker's gradient; no worker more than ``staleness`` steps ahead of the
              slowest. With ``staleness`` 0 that is sync
    async     an update for every worker's gradient as it comes

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server (2014); Ho et al., More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (2013).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from launcher.base.units import format_bytes
from launcher.contract.config import DEFAULT_ARCHITECTURE
from launcher.contract.optim.plugin import whole_tensor_faults
from launcher.contract.plan import Plan
from launcher.contract.strategy import (
    Architecture,
    Fault,
    JobShape,
    RankCost,
    RoleGroup,
    RunReport,
    Section,
    TrainedRun,
)
from launcher_plugins.architectures.parameter_server.config import (
    NAME,
    PATH,
    SERVER,
    ParameterServerConfig,
    settings_of,
)
from launcher_plugins.architectures.parameter_server.cost import section, server_bytes, worker_cost
from launcher_plugins.architectures.parameter_server.report import report

_RUNTIME = "launcher_plugins.architectures.parameter_server.runtime.worker"


class ParameterServer(Architecture):
    """Workers push gradients to servers and pull parameters from them."""

    runtime = f"{_RUNTIME}:update"
    exact = True
    Config = ParameterServerConfig

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Layouts whose workers do not hold the whole model, and settings without an effect."""
        yield from _layout_faults(job)
        yield from _setting_faults(settings_of(job.config))
        yield from _memory_faults(job)
        why = "servers hold ranges of elements that begin and end anywhere"
        yield from whole_tensor_faults(job.config, why, {"architecture.name": DEFAULT_ARCHITECTURE})
        if job.config.precision.compute == "fp16":
            rule = "a loss scale that follows overflows belongs to one optimizer, and each server has its own"
            yield Fault("precision.compute", "fp16", rule, ways=({"precision.compute": "bf16"},))
        if job.config.precision.compute != "fp32" and (number := job.model.num_fp32_parameters):
            rule = f"servers send all weights in one format, the model keeps {number} in fp32 (keep_in_fp32)"
            ways = ({"precision.compute": "fp32"},)
            yield Fault("precision.compute", job.config.precision.compute, rule, ways=ways)

    def roles(self, job: JobShape) -> tuple[RoleGroup, ...]:
        """The workers, then the servers."""
        settings = settings_of(job.config)
        return (
            RoleGroup(
                name="trainer",
                num_ranks=job.mesh.num_ranks,
                trains=True,
                is_expendable=settings.goes_on,
            ),
            RoleGroup(
                name=SERVER,
                num_ranks=settings.servers,
                trains=False,
                serve="launcher_plugins.architectures.parameter_server.runtime.server:serve",
                memory_bytes=server_bytes(job),
                sized_by=f"{PATH}.servers",
            ),
        )

    def notes(self, job: JobShape) -> Iterable[str]:
        """What follows if a worker fails, and what a checkpoint is where workers are not in step."""
        settings, timeout_s = settings_of(job.config), job.config.run.timeout_s
        then = "the others continue" if settings.goes_on else "the run fails"
        yield (
            f"If a worker fails, {then} (architecture.on_worker_loss); a worker or a server that hangs times "
            f"out after run.timeout_s = {timeout_s:g} s. If a server fails, the run ends."
        )
        if not settings.is_lockstep and job.config.train.checkpoint_interval:
            yield (
                "A checkpoint is what the servers hold when the slowest worker has made its steps; workers "
                "ahead of it make some of theirs again after a resume."
            )

    def cost(self, job: JobShape, pp_rank: int) -> RankCost:
        """Gradients to the servers, and parameters back."""
        return worker_cost(job)

    def describe(self, job: JobShape) -> Iterable[Section]:
        """The exchange beside an all-reduce."""
        yield section(job, NAME)

    def layout(self, plan: Plan) -> Iterable[str]:
        """When the servers update, and how many there are."""
        options = plan.config.architecture.options
        name, *others = super().layout(plan)
        chosen = {key: options.get(key) for key in ("mode", "staleness")}
        return [name, *(f"{key}={value}" for key, value in chosen.items() if value is not None), *others]

    def report(self, run: TrainedRun) -> RunReport:
        """What the servers took, which workers were late or lost, and how old the gradients were."""
        return report(run, run.plan.section(NAME))

    def is_exact(self, job: JobShape) -> bool:
        """In lock-step with whole gradients."""
        settings = settings_of(job.config)
        return settings.is_lockstep and settings.compression == "none"


def _layout_faults(job: JobShape) -> Iterator[Fault]:
    parallel = job.config.parallel
    whole: dict[str, Any] = {"parallel.tp": 1, "parallel.pp": 1}
    for axis in ("tp", "pp"):
        if (size := job.mesh.size(axis)) > 1:
            rule = (
                "each worker of a parameter server holds the whole model, and updates are those of whole "
                "tensors: world = dp workers + servers, so tp and pp must be 1"
            )
            ways = ({f"parallel.{axis}": 1}, whole)
            yield Fault(f"parallel.{axis}", size, rule, ways=ways)
    if parallel.dp == 1:
        rule = "a parameter server needs at least 2 workers"
        yield Fault("parallel.dp", 1, rule, ways=({"parallel.dp": 2},))
    num_servers = settings_of(job.config).servers
    num_trained = job.model.num_trained_parameters
    if num_servers > num_trained:
        rule = f"the model has {num_trained} parameters to train, and each server holds some of them"
        yield Fault(f"{PATH}.servers", num_servers, rule, ways=({f"{PATH}.servers": 1},))


def _setting_faults(settings: ParameterServerConfig) -> Iterator[Fault]:
    """Settings that would do nothing, or that miss one that they need."""
    if settings.mode == "bounded" and settings.staleness is None:
        rule = "needs a bound"
        yield Fault(f"{PATH}.mode", "bounded", rule, ways=({f"{PATH}.staleness": 2},))
    if settings.mode != "bounded" and settings.staleness is not None:
        rule = f"has an effect only in mode bounded, and the mode is {settings.mode}"
        ways = ({f"{PATH}.mode": "bounded"}, {f"{PATH}.staleness": None})
        yield Fault(f"{PATH}.staleness", settings.staleness, rule, ways=ways)
    if settings.is_lockstep and settings.lr_scale is not None:
        rule = "has an effect only where each worker's gradient is an update of its own, not in lock-step"
        yield Fault(f"{PATH}.lr_scale", settings.lr_scale, rule, ways=({f"{PATH}.lr_scale": None},))
    if settings.compression == "top_k" and settings.top_k_fraction is None:
        rule = "needs the share that is pushed"
        yield Fault(f"{PATH}.compression", "top_k", rule, ways=({f"{PATH}.top_k_fraction": 0.01},))
    if settings.compression != "top_k" and settings.top_k_fraction is not None:
        rule = f"has an effect only with compression top_k, and it is {settings.compression}"
        ways = ({f"{PATH}.compression": "top_k"}, {f"{PATH}.top_k_fraction": None})
        yield Fault(f"{PATH}.top_k_fraction", settings.top_k_fraction, rule, ways=ways)


def _memory_faults(job: JobShape) -> Iterator[Fault]:
    """On the CPU a server has as much memory as a worker; what a server beside GPUs has is not known."""
    held, limit = server_bytes(job), job.config.device.memory_bytes
    if job.config.device.kind == "cpu" and held > limit:
        num_servers = settings_of(job.config).servers
        rule = f"each server would hold {format_bytes(held)}, and has {format_bytes(limit)}"
        ways = ({f"{PATH}.servers": -(-held * num_servers // limit)},)
        yield Fault(f"{PATH}.servers", num_servers, rule, ways=ways)
