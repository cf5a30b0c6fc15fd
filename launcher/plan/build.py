"""The whole plan: checked, predicted, and written down as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import accumulate

from launcher.contract.config import LaunchConfig
from launcher.contract.executor import Executor
from launcher.contract.plan import VERSION, Plan, Role, RolePlan
from launcher.contract.site import SiteConfig
from launcher.contract.strategy import JobShape, RoleGroup
from launcher.plan.checked_job import CheckedJob, PlanInputs, examine
from launcher.plan.cost.memory import states_of
from launcher.plan.cost.shapes import train_flops
from launcher.plan.cost.timing import plan_schedule
from launcher.plan.cost.traffic import plan_traffic
from launcher.plan.notes import balance_note, plan_notes
from launcher.plan.plugins import plugin_errors
from launcher.plan.rules.memory_fit import memory_faults, predict
from launcher.plan.rules.refusal import refusal
from launcher.plan.rules.unread import unread_faults, unread_links, unread_notes
from launcher.typed.read import NO_SOURCES, Source

_NO_INPUTS = PlanInputs()


def build(
    config: LaunchConfig,
    sources: Mapping[str, Source] = NO_SOURCES,
    *,
    inputs: PlanInputs = _NO_INPUTS,
    source_roots: tuple[str, ...] = (),
) -> Plan:
    """The plan of a configuration. ``source_roots``: folders from which the ranks import a user's own model.

    Raises:
        PlanError: with every reason why the strategy cannot run.
        PluginError: when a named plugin fails to load, or fails in what it is asked.
    """
    with plugin_errors():
        return _built(config, sources, inputs, source_roots)


def _built(
    config: LaunchConfig, sources: Mapping[str, Source], inputs: PlanInputs, source_roots: tuple[str, ...]
) -> Plan:
    checked = examine(config, sources, inputs)
    if not isinstance(checked, CheckedJob):
        assert checked, "the shape of a user's own model is measured before it is planned"
        raise refusal(config, checked, sources, inputs)
    job, chosen = checked.shape, checked.chosen
    predicted = predict(job, chosen)
    links = [*unread_links(job, predicted.costs, sources)]
    # All but the links were judged before.
    unread = unread_faults(job.config, sources, job.roles, links) if links else []
    faults = memory_faults(predicted.memory, job, chosen)
    if refused := [*unread, *(faults if config.device.memory_check == "refuse" else ())]:
        raise refusal(config, refused, sources, inputs)
    costs = predicted.costs
    schedule = plan_schedule(job, chosen.schedule, predicted.lists, costs, predicted.memory)
    owner = chosen.owner
    notes = [f"Planned, but by prediction it ends out of memory: {fault.allowed}." for fault in faults]
    notes += unread_notes(job.config, sources, job.roles, links)
    notes += plan_notes(config.batch, job, chosen.schedule, schedule, costs)
    if config.parallel.layers_per_stage == "auto":
        notes.append(balance_note(job, chosen.parallels))
    for plugin in (chosen.architecture, *chosen.parallels):
        notes += plugin.notes(job)
    plan = Plan(
        version=VERSION,
        config=job.config,
        mesh=job.mesh,
        roles=_roles(job),
        batch=checked.batch,
        stages=job.stages,
        num_parameters=checked.model.num_parameters,
        num_frozen_parameters=checked.model.num_parameters - checked.model.num_trained_parameters,
        step_flops=train_flops(checked.model, job.global_size),
        schedule=schedule,
        memory=predicted.memory,
        traffic=plan_traffic(job, costs),
        plugins=chosen.records,
        parallels=tuple(parallel.runtime for parallel in chosen.parallels),
        update=(owner.update if owner else None) or chosen.architecture.runtime,
        exact=chosen.architecture.is_exact(job),
        notes=(),
        source_roots=source_roots,
        documents=owner.documents(job) if owner else {},
        sections=tuple(
            section
            for plugin in (chosen.architecture, *chosen.candidates)
            for section in plugin.describe(job)
        ),
        num_input_ids=checked.model.num_input_ids,
        num_state_elements=job.num_state_elements(),
        num_update_copies=1 if states_of(job, 0, costs[0]).is_sharded else job.mesh.dp,
    )
    return replace(plan, notes=(*notes, *_start_notes(plan, chosen.executor)))


def _start_notes(plan: Plan, executor: Executor) -> Iterator[str]:
    """What its executor says of a plan, and the devices that it leaves idle."""
    for fault in executor.check(plan):
        yield f"Planned, but it cannot be started like this: {fault}"
    yield from executor.notes(plan)
    total, idle = plan.num_devices, plan.num_devices - plan.num_cluster_ranks
    if idle > 0 and plan.config.device.kind != "cpu":  # there a device is a process: unused ones cost nothing
        yield f"{idle} of {total} devices stay idle; figures per device divide by all {total}."


def _roles(job: JobShape) -> tuple[RolePlan, ...]:
    """The roles on consecutive ranks, in the architecture's order."""
    firsts = accumulate((group.num_ranks for group in job.roles), initial=0)
    return tuple(
        RolePlan(
            first_rank=first,
            num_nodes=_num_nodes(group, job.config.site),
            **{item.name: getattr(group, item.name) for item in fields(Role)},
        )
        for first, group in zip(firsts, job.roles, strict=False)
    )


def _num_nodes(group: RoleGroup, site: SiteConfig) -> int | None:
    """Nodes that a role has for itself at this site."""
    if group.trains or group.name not in site.roles:
        return None
    return -(-group.num_ranks // site.roles[group.name].ranks_per_node)
