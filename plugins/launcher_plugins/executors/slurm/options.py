"""The options that a job is submitted with, from the plan and the site.

Source: the manual page sbatch(1), Slurm 22.05 to 24.11.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.base.errors import Fault
from launcher.contract.config import LaunchConfig
from launcher.contract.job import EXECUTOR_LOG, JobRequest
from launcher.contract.site import RoleSite, SiteConfig
from launcher_plugins.executors.slurm.continuation import SlurmConfig, save_signal

SEPARATOR = ","
"""Separator of the ids of a chain in a handle."""
EXPORTED = ("HOME", "LANG", "LOGNAME", "PATH", "USER")
"""Variables of the submitting environment that every job gets."""
_Options = dict[str, str | int | bool | None]


@dataclass(frozen=True, kw_only=True)
class NodeLayout:
    """Ranks on nodes: 0 .. ranks_per_node-1 on the first node, and so on."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        """Ranks on all of these nodes."""
        return self.num_nodes * self.ranks_per_node


def node_layout(config: LaunchConfig, world_size: int) -> NodeLayout | Fault:
    """The nodes that the ranks fill, or the fault where these are not the cluster's."""
    nodes, devices = config.cluster.nodes, config.cluster.devices_per_node
    if world_size > devices and world_size % devices:
        rule = f"{world_size} ranks do not fill whole nodes of {devices} devices"
        ways = ({"cluster.devices_per_node": world_size // nodes},) if world_size % nodes == 0 else ()
        fix = "" if ways else "Choose a number that divides them."
        return Fault("cluster.devices_per_node", devices, rule, fix, ways=ways)
    needed = -(-world_size // devices)
    if needed != nodes:
        rule = f"{world_size} ranks fill {needed} node{'s' if needed > 1 else ''} of {devices} devices"
        spread = ({"cluster.devices_per_node": world_size // nodes},) if world_size % nodes == 0 else ()
        return Fault("cluster.nodes", nodes, rule, ways=({"cluster.nodes": needed}, *spread))
    return NodeLayout(num_nodes=nodes, ranks_per_node=min(world_size, devices))


def directives(
    config: LaunchConfig, layout: NodeLayout, request: JobRequest, *, tasks_per_node: int
) -> list[str]:
    """The ``#SBATCH`` lines."""
    site = config.site
    cpus = site.cpus_per_rank and site.cpus_per_rank * layout.ranks_per_node // tasks_per_node
    options: _Options = {
        "job-name": config.name,
        "nodes": layout.num_nodes + config.cluster.spare_nodes,
        "no-kill": config.cluster.spare_nodes > 0,  # a job with spare nodes survives the crash of one
        "ntasks-per-node": tasks_per_node,
        "cpus-per-task": cpus,
        **device_request(config, layout.ranks_per_node),
        **_placement(config, site),
        "nodelist": site.nodelist,
        # Slurm expands % patterns such as %j in file names.
        "output": f"{request.run_dir}/{EXECUTOR_LOG}".replace("%", "%%"),
        "open-mode": "append",
        "signal": save_signal(config),
        "export": ",".join(sorted({*EXPORTED, *site.forward, *site.secrets})),
        **dict(sorted(site.options.items())),
    }
    if request.after:
        others = [str(options["dependency"])] if options.get("dependency") else []
        options["dependency"] = ",".join([*others, f"afterany:{request.after.replace(SEPARATOR, ':')}"])
    return _lines(options)


def role_directives(config: LaunchConfig, site: RoleSite, layout: NodeLayout) -> list[str]:
    """Those of a role with nodes of its own, without the options that apply to the whole job."""
    options: _Options = {
        "nodes": layout.num_nodes,
        "ntasks-per-node": layout.ranks_per_node,
        "cpus-per-task": site.cpus_per_rank,
    }
    return _lines(options | _placement(config, site))


def _placement(config: LaunchConfig, nodes: SiteConfig | RoleSite) -> _Options:
    """The options that every component of a job has: which nodes, for how long, charged to whom."""
    site, is_requeued = config.site, config.executor.settings(SlurmConfig).continuation == "requeue"
    return {
        "mem": nodes.memory_per_node,
        "time": site.time_limit,
        "account": site.account,
        "partition": nodes.partition or site.partition,
        "qos": site.qos,
        "reservation": site.reservation,
        "constraint": nodes.constraint,
        "exclude": site.exclude,
        "requeue": is_requeued,
        "no-requeue": not is_requeued,
    }


def _lines(options: _Options) -> list[str]:
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={quoted(str(value))}"
        for name, value in given.items()
    ]


def quoted(text: str) -> str:
    r"""A value quoted for sbatch's own reader of scripts, which is not a shell.

    >>> print(quoted('a "b" # $c'), quoted("node[01-03]"))
    "a \"b\" # $c" "node[01-03]"
    """
    if re.fullmatch(r"[\w./:,@%+=-]+", text, re.ASCII):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def device_request(config: LaunchConfig, count: int) -> _Options:
    """How the devices of a node are asked for; empty where they are not."""
    site = config.site
    if config.device.kind != "cuda" or site.gpu_request == "none":
        return {}
    if site.gpu_request == "gpus_per_node":
        return {"gpus-per-node": count}
    kind = f":{site.gpu_type}" if site.gpu_request == "gres_typed" else ""
    return {"gres": f"gpu{kind}:{count}"}
