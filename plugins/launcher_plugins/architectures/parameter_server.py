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
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from launcher.config.schema import Few, Index, LaunchConfig, Positive
from launcher.interfaces import Fault, JobShape, RoleGroup
from launcher.typed import Range, Reading, read

SERVER = "server"
"""Role of the ranks that hold the parameters."""
_PATH = "architecture"
_RUNTIME = "launcher_plugins.architectures.parameter_server_runtime"


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig:
    """Settings of the architecture."""

    mode: Literal["sync", "async", "bounded"] = "sync"
    """When a server updates: ``sync`` once a step, with every worker's gradient; ``async`` with each
    gradient as it comes; ``bounded`` likewise, but holds back workers that are too far ahead."""
    servers: Few = 1
    """Ranks that hold the parameters, beside the parallel.dp workers."""
    staleness: Index | None = None
    """Steps that a worker may be ahead of the slowest (``bounded``); 0 is ``sync``."""
    lr_scale: Positive | None = None
    """Factor of the learning rate where each worker's gradient is an update of its own; null = 1 over the
    number of workers."""
    overlap: bool = True
    """Push during the backward and pull during the forward, not after the one and before the other."""
    compression: Literal["none", "bf16", "top_k"] = "none"
    """What is pushed: all gradients; rounded to bf16; the largest alone. What is left out is added to the
    next step's (error feedback)."""
    top_k_fraction: Annotated[float, Range(above=0, maximum=1)] | None = None
    """Share of the gradients that ``top_k`` pushes."""
    on_worker_loss: Literal["fail", "continue"] | None = None
    """Whether the run fails when a worker is gone, or goes on with the others; null = ``fail`` in lock-step,
    else ``continue``."""

    @property
    def is_lockstep(self) -> bool:
        """Whether there is one update a step, with the sum over all workers."""
        return self.mode == "sync" or (self.mode == "bounded" and self.staleness == 0)

    @property
    def goes_on(self) -> bool:
        """Whether the run outlives a worker."""
        default = "fail" if self.is_lockstep else "continue"
        return (self.on_worker_loss or default) == "continue"

    def lr_factor(self, num_workers: int) -> float:
        """What the learning rate is multiplied by."""
        if self.is_lockstep:
            return 1.0
        return 1 / num_workers if self.lr_scale is None else self.lr_scale


class ParameterServer:
    """Workers push gradients to servers and pull parameters from them."""

    runtime = f"{_RUNTIME}:update"
    exact = True
    Config = ParameterServerConfig

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Layouts whose workers do not hold the whole model, and settings without an effect."""
        yield from _layout_faults(job)
        yield from _setting_faults(settings_of(job.config))
        if job.config.precision.compute == "fp16":
            rule = "a loss scale that follows overflows belongs to one optimizer, and each server has its own"
            yield Fault("precision.compute", "fp16", rule, ways=({"precision.compute": "bf16"},))

    def roles(self, job: JobShape) -> tuple[RoleGroup, ...]:
        """The workers, then the servers."""
        settings = settings_of(job.config)
        return (
            RoleGroup(name="trainer", num_ranks=job.mesh.num_ranks, trains=True),
            RoleGroup(
                name=SERVER,
                num_ranks=settings.servers,
                trains=False,
                serve="launcher_plugins.architectures.parameter_server_serve_runtime:serve",
            ),
        )

    def is_exact(self, job: JobShape) -> bool:
        """In lock-step with whole gradients."""
        settings = settings_of(job.config)
        return settings.is_lockstep and settings.compression == "none"


def settings_of(config: LaunchConfig) -> ParameterServerConfig:
    """The settings of the architecture, which planning has checked."""
    settings = read(ParameterServerConfig, config.architecture.options, Reading(), _PATH)
    assert settings is not None, "the plan was made with options that its architecture does not know"
    return settings


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
        rule = "there is one worker (parallel.dp=1), which shares its parameters with nobody"
        yield Fault("parallel.dp", 1, rule, ways=({"parallel.dp": 2},))
    num_servers = settings_of(job.config).servers
    if num_servers > job.model.num_parameters:
        rule = f"the model has {job.model.num_parameters} parameters, and each server holds some of them"
        yield Fault(f"{_PATH}.servers", num_servers, rule, ways=({f"{_PATH}.servers": 1},))


def _setting_faults(settings: ParameterServerConfig) -> Iterator[Fault]:
    """Settings that would do nothing, or that miss one that they need."""
    if settings.mode == "bounded" and settings.staleness is None:
        rule = "needs a bound"
        yield Fault(f"{_PATH}.mode", "bounded", rule, ways=({f"{_PATH}.staleness": 2},))
    if settings.mode != "bounded" and settings.staleness is not None:
        rule = f"has an effect only in mode bounded, and the mode is {settings.mode}"
        ways = ({f"{_PATH}.mode": "bounded"}, {f"{_PATH}.staleness": None})
        yield Fault(f"{_PATH}.staleness", settings.staleness, rule, ways=ways)
    if settings.is_lockstep and settings.lr_scale is not None:
        rule = "has an effect only where each worker's gradient is an update of its own, not in lock-step"
        yield Fault(f"{_PATH}.lr_scale", settings.lr_scale, rule, ways=({f"{_PATH}.lr_scale": None},))
    if settings.compression == "top_k" and settings.top_k_fraction is None:
        rule = "needs the share that is pushed"
        yield Fault(f"{_PATH}.compression", "top_k", rule, ways=({f"{_PATH}.top_k_fraction": 0.01},))
    if settings.compression != "top_k" and settings.top_k_fraction is not None:
        rule = f"has an effect only with compression top_k, and it is {settings.compression}"
        ways = ({f"{_PATH}.compression": "top_k"}, {f"{_PATH}.top_k_fraction": None})
        yield Fault(f"{_PATH}.top_k_fraction", settings.top_k_fraction, rule, ways=ways)
