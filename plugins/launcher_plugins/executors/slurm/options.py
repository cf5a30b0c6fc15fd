"""The options of sbatch: those set from the plan and the site, and those that ``site.options`` may give.

Source: the manual page sbatch(1), Slurm 22.05 to 24.11.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.base.errors import Fault, nearest
from launcher.contract.config import LaunchConfig
from launcher.contract.job import EXECUTOR_LOG, JobRequest
from launcher.contract.site import RoleSite, SiteConfig
from launcher_plugins.executors.slurm.continuation import SlurmConfig, save_signal

SEPARATOR = ","
"""Separator of the ids of a chain in a handle."""
EXPORTED = ("HOME", "LANG", "LOGNAME", "PATH", "USER")
"""Variables of the submitting environment that every job gets."""
OWN_SETTINGS = {
    "account": "site.account",
    "partition": "site.partition",
    "qos": "site.qos",
    "reservation": "site.reservation",
    "constraint": "site.constraint",
    "nodelist": "site.nodelist",
    "exclude": "site.exclude",
    "time": "site.time_limit",
    "mem": "site.memory_per_node",
    "cpus-per-task": "site.cpus_per_rank",
    "cpu-bind": "site.cpu_bind",
    "gpus-per-node": "site.gpu_request",
    "gres": "site.gpu_request",
    "export": "site.forward",
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes",
    "ntasks-per-node": "cluster.devices_per_node",
    "gpus": "cluster.devices_per_node",
    "gpus-per-task": "cluster.devices_per_node",
    "job-name": "name",
    "container-image": "site.container_image",
    "container-mounts": "site.container_mounts",
    "requeue": "executor.continuation",
    "no-requeue": "executor.continuation",
    "kill-on-invalid-dep": "executor.continuation",
    "signal": "executor.save_lead_s",
}
"""Options that have a setting of their own."""
NOT_ALLOWED = {
    "gpu-bind": "hides devices from their ranks, which choose by LOCAL_RANK among all of the node",
    "array": "starts several jobs, and a run is one",
    "wrap": "would replace the script",
    "output": "would keep the job's output out of the run directory",
    "error": "would keep the job's output out of the run directory",
    "open-mode": "would lose the output of the start before when a job is requeued",
    "export-file": "would bring variables that site.forward does not list",
    "parsable": "is given already",
    "test-only": "would submit nothing",
    "wait": "would block: use trireme wait",
    "distribution": "would put ranks on other nodes than the plan does",
}
_OTHERS = """
    begin bb bbf chdir cluster-constraint clusters comment container contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot dependency exclusive extra-node-info
    get-user-env gid gpu-freq gpus-per-socket gres-flags hint hold ignore-pbs input
    licenses mail-type mail-user mcs-label mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill
    ntasks-per-core ntasks-per-gpu ntasks-per-socket overcommit oversubscribe power prefer
    priority profile propagate quiet reboot segment sockets-per-node spread-job switches
    thread-spec threads-per-core time-min tmp tres-bind tres-per-task uid use-min-nodes verbose
    wait-all-nodes wckey
"""
KNOWN = frozenset(_OTHERS.split()) | OWN_SETTINGS.keys() | NOT_ALLOWED.keys()
"""Every option of sbatch, to recognize mistyped ones."""
_Options = dict[str, str | int | bool | None]
_OPTION = re.compile(r"[a-z][a-z0-9-]*")


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
        way = f"Set cluster.devices_per_node={world_size // nodes}." if world_size % nodes == 0 else ""
        return Fault("cluster.devices_per_node", devices, rule, way or "Choose a number that divides them.")
    needed = -(-world_size // devices)
    if needed != nodes:
        rule = f"{world_size} ranks fill {needed} node{'s' if needed > 1 else ''} of {devices} devices"
        way = f" or cluster.devices_per_node={world_size // nodes}" if world_size % nodes == 0 else ""
        return Fault("cluster.nodes", nodes, rule, f"Set cluster.nodes={needed}{way}.")
    return NodeLayout(num_nodes=nodes, ranks_per_node=min(world_size, devices))


def option_faults(site: SiteConfig) -> Iterator[Fault]:
    """Faults of ``site.options``: options with a setting of their own, and mistyped names.

    A name that is similar to no known one is passed on: a site's SPANK plugins add options.
    """
    for name, value in site.options.items():
        path = f"site.options.{name}"
        if not _OPTION.fullmatch(name):
            rule = "is not an option's name: small letters, digits and dashes, none in front"
            yield Fault(path, value, rule, f"Write {name.strip('-').replace('_', '-').lower()}.")
        elif name in OWN_SETTINGS:
            rule = f"is set by {OWN_SETTINGS[name]} and cannot be given here too"
            yield Fault(path, value, rule, f"Set {OWN_SETTINGS[name]}, and remove {path}.")
        elif name in NOT_ALLOWED:
            yield Fault(path, value, f"--{name} {NOT_ALLOWED[name]}", f"Remove {path}.")
        elif name not in KNOWN and (match := nearest(name, KNOWN)):
            yield Fault(path, value, "sbatch has no such option", f"Did you mean {match}?")


def binding_faults(config: LaunchConfig) -> Iterator[Fault]:
    """A binding per task, where one task starts all ranks of a node."""
    binding = config.site.cpu_bind or ""
    if config.executor.settings(SlurmConfig).starter == "torchrun" and re.search("rank|map|mask", binding):
        rule = "binds each task to a processor, and executor.starter=torchrun has one task for a whole node"
        yield Fault("site.cpu_bind", binding, rule, "Set site.cpu_bind=cores, or executor.starter=srun.")


def directives(
    config: LaunchConfig, layout: NodeLayout, request: JobRequest, *, tasks_per_node: int
) -> list[str]:
    """The ``#SBATCH`` lines."""
    site = config.site
    cpus = site.cpus_per_rank and site.cpus_per_rank * layout.ranks_per_node // tasks_per_node
    options: _Options = {
        "job-name": config.name,
        "nodes": layout.num_nodes,
        "ntasks-per-node": tasks_per_node,
        "cpus-per-task": cpus,
        **_device_request(config, layout.ranks_per_node),
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


def _device_request(config: LaunchConfig, count: int) -> _Options:
    site = config.site
    if config.device.kind != "cuda" or site.gpu_request == "none":
        return {}
    if site.gpu_request == "gpus_per_node":
        return {"gpus-per-node": count}
    kind = f":{site.gpu_type}" if site.gpu_request == "gres_typed" else ""
    return {"gres": f"gpu{kind}:{count}"}
