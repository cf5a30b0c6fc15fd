"""Roles with nodes of their own: the components of a heterogeneous job after that of the trainers.

Source: Slurm's documentation, Heterogeneous Job Support; sbatch(1) and srun(1), --het-group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.base.arithmetic import divisors
from launcher.base.errors import LEFT_OUT, Fault, nearest
from launcher.base.units import counted
from launcher.contract.config import LaunchConfig
from launcher.contract.plan import RolePlan
from launcher.contract.site import RoleSite
from launcher_plugins.executors.slurm.continuation import SlurmConfig
from launcher_plugins.executors.slurm.options import NodeLayout

HET_JOB = "#SBATCH hetjob"
"""The line between the components of a heterogeneous job."""


@dataclass(frozen=True, kw_only=True)
class HetComponent:
    """The ranks of one role, on nodes of their own."""

    role: str
    site: RoleSite
    layout: NodeLayout


def het_components(config: LaunchConfig, roles: Sequence[RolePlan]) -> tuple[HetComponent, ...]:
    """The components of the job after the trainers', in the order of the ranks."""
    found = []
    for role in roles:
        if role.trains or role.name not in config.site.roles:
            continue
        site = config.site.roles[role.name]
        per_node = min(role.num_ranks, site.ranks_per_node)
        layout = NodeLayout(num_nodes=-(-role.num_ranks // per_node), ranks_per_node=per_node)
        found.append(HetComponent(role=role.name, site=site, layout=layout))
    return tuple(found)


def role_faults(config: LaunchConfig, roles: Sequence[RolePlan]) -> Iterator[Fault]:
    """Nodes for a role that does not exist, or whose ranks do not fill them. A site may name roles of
    other architectures."""
    others = {role.name: role.num_ranks for role in roles if not role.trains}
    for name, site in config.site.roles.items():
        path = f"site.roles.{name}"
        if name not in others and others:
            rule = f"the roles beside the trainers are {', '.join(others)} (architecture.name)"
            yield Fault(path, "...", rule, f"Name {nearest(name, others) or next(iter(others))}.")
        elif name in others and others[name] > site.ranks_per_node and others[name] % site.ranks_per_node:
            rule = f"{others[name]} ranks do not fill whole nodes of {site.ranks_per_node}"
            near = min(divisors(others[name]), key=lambda size: abs(size - site.ranks_per_node))
            ways = ({f"{path}.ranks_per_node": near},)
            yield Fault(f"{path}.ranks_per_node", site.ranks_per_node, rule, ways=ways)
    starter = config.executor.settings(SlurmConfig).starter
    if starter == "torchrun" and others.keys() & config.site.roles.keys():
        rule = "torchrun starts equal nodes, and roles have nodes of their own (site.roles)"
        srun, nowhere = {"executor.starter": "srun"}, {"site.roles": LEFT_OUT}
        yield Fault("executor.starter", "torchrun", rule, ways=(srun, nowhere))


def role_notes(config: LaunchConfig, roles: Sequence[RolePlan]) -> Iterator[str]:
    """Where the ranks of such a role are, and that a run which survives the loss of a rank does not survive
    that of a node."""
    if config.cluster.nodes > 1 and any(role.is_expendable for role in roles):
        yield "The others continue without a rank whose process ends; the failure of a node ends them all."
    for component in het_components(config, roles):
        nodes = counted(component.layout.num_nodes, "further node")
        where = f" of partition {component.site.partition}" if component.site.partition else ""
        setting = f"site.roles.{component.role}"
        yield f"Role {component.role} is on {nodes}{where}, in one heterogeneous job ({setting})."
