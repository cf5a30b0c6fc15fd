"""The whole plan: checked, predicted, and written down as data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from launcher.contract.config import LaunchConfig
from launcher.contract.executor import LimitsTime
from launcher.contract.plan import VERSION, BatchPlan, ExchangePlan, Plan, RolePlan
from launcher.contract.site import SiteConfig
from launcher.contract.strategy import (
    ComparesExchange,
    HasNotes,
    JobShape,
    KnowsExactness,
    OwnsUpdate,
    RoleGroup,
)
from launcher.plan.checked_job import CheckedJob, Describe, Probes, asked_once, examine
from launcher.plan.cost.measured import ReadRun
from launcher.plan.cost.shapes import train_flops
from launcher.plan.cost.timing import plan_schedule
from launcher.plan.cost.traffic import plan_traffic
from launcher.plan.layout.resolve import padded_vocabulary
from launcher.plan.notes import balance_note, idle_note, plan_notes
from launcher.plan.plugins import plugin_errors
from launcher.plan.rules.memory_fit import laid_out, memory_faults
from launcher.plan.rules.refusal import refusal
from launcher.typed.read import Source

_NO_SOURCES: Mapping[str, Source] = MappingProxyType({})


def build(
    config: LaunchConfig,
    sources: Mapping[str, Source] = _NO_SOURCES,
    *,
    describe: Describe | None = None,
    read_run: ReadRun | None = None,
    source_roots: tuple[str, ...] = (),
) -> Plan:
    """The plan of a configuration.

    ``describe`` measures a user's own model, which ``source_roots`` let the ranks import; ``read_run`` reads
    `device.measured_in`.

    Raises:
        PlanError: with every reason why the strategy cannot run.
        PluginError: when a named plugin fails to load, or fails in what it is asked.
    """
    with plugin_errors():
        return _built(config, sources, asked_once(describe, read_run), source_roots)


def _built(
    config: LaunchConfig, sources: Mapping[str, Source], probes: Probes, source_roots: tuple[str, ...]
) -> Plan:
    checked = _checked(config, sources, probes)
    job, chosen = checked.shape, checked.chosen
    laid = laid_out(job, chosen)
    faults = memory_faults(laid.memory, job)
    if faults and config.device.memory_check == "refuse":
        raise refusal(config, faults, sources, probes)
    costs = laid.costs
    schedule = plan_schedule(job, chosen.schedule, laid.lists, costs, laid.memory)
    owner = next((parallel for parallel in chosen.parallels if isinstance(parallel, OwnsUpdate)), None)
    roles = _roles(checked)
    notes = [f"Planned, but by prediction it ends out of memory: {fault.allowed}." for fault in faults]
    notes += plan_notes(job, checked.batch, schedule, costs)
    if config.parallel.layers_per_stage == "auto":
        notes.append(balance_note(job, chosen.parallels))
    notes += chosen.architecture.notes(job) if isinstance(chosen.architecture, HasNotes) else ()
    notes += [f"Planned, but it cannot be started like this: {fault}" for fault in chosen.executor.check(job)]
    notes += chosen.executor.notes(job)
    if isinstance(chosen.executor, LimitsTime):
        notes += chosen.executor.time_notes(job, config.train.num_steps * schedule.step_s)
    if job.cluster.device.kind != "cpu":  # there a device is a process, and an unused one costs nothing
        notes += idle_note(
            sum(role.num_ranks for role in roles if role.num_nodes is None), job.cluster.num_devices
        )
    return Plan(
        version=VERSION,
        config=job.config,
        mesh=job.mesh,
        roles=roles,
        batch=_batch(checked),
        stages=job.stages,
        num_parameters=checked.model.num_parameters,
        step_flops=train_flops(checked.model, job.global_size),
        schedule=schedule,
        memory=laid.memory,
        traffic=plan_traffic(job, costs),
        plugins=chosen.records,
        parallels=tuple(parallel.runtime for parallel in chosen.parallels),
        update=owner.update if owner else chosen.architecture.runtime,
        exact=_is_exact(checked),
        notes=tuple(notes),
        source_roots=source_roots,
        documents=owner.documents(job) if owner else {},
        exchange=_exchange(checked),
    )


def job_shape(
    config: LaunchConfig, sources: Mapping[str, Source] = _NO_SOURCES, *, describe: Describe | None = None
) -> JobShape:
    """The checked job of a configuration, without predictions.

    Raises:
        PlanError: with every reason why the strategy cannot run.
    """
    return _checked(config, sources, asked_once(describe, None)).shape


def _checked(config: LaunchConfig, sources: Mapping[str, Source], probes: Probes) -> CheckedJob:
    found = examine(config, sources, probes)
    if isinstance(found, CheckedJob):
        return found
    raise refusal(config, found, sources, probes)


def _roles(checked: CheckedJob) -> tuple[RolePlan, ...]:
    """The roles on consecutive ranks, in the architecture's order."""
    roles, first = [], 0
    for group in checked.shape.roles:
        roles.append(
            RolePlan(
                name=group.name,
                first_rank=first,
                num_ranks=group.num_ranks,
                trains=group.trains,
                num_nodes=_num_nodes(group, checked.shape.config.site),
                serve=group.serve,
                memory_bytes=group.memory_bytes,
                is_expendable=group.is_expendable,
            )
        )
        first += group.num_ranks
    return tuple(roles)


def _num_nodes(group: RoleGroup, site: SiteConfig) -> int | None:
    """Nodes that a role has for itself at this site."""
    if group.trains or group.name not in site.roles:
        return None
    return -(-group.num_ranks // site.roles[group.name].ranks_per_node)


def _exchange(checked: CheckedJob) -> ExchangePlan | None:
    architecture = checked.chosen.architecture
    return architecture.compare(checked.shape) if isinstance(architecture, ComparesExchange) else None


def _is_exact(checked: CheckedJob) -> bool:
    architecture = checked.chosen.architecture
    if isinstance(architecture, KnowsExactness):
        return architecture.is_exact(checked.shape)
    return architecture.exact


def _batch(checked: CheckedJob) -> BatchPlan:
    config, sizes = checked.shape.config, checked.batch
    return BatchPlan(
        global_size=sizes.global_size,
        micro_size=sizes.micro_size,
        num_microbatches=sizes.num_microbatches,
        seq_length=config.batch.seq_length,
        padded_vocab_size=padded_vocabulary(config.model, config.parallel.tp),
    )
