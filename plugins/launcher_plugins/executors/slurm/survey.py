"""What a cluster reports about itself, and what it leaves to the user: the questions of a new site.

Source: the manual pages scontrol(1), sinfo(1) and sacctmgr(1). Text output is read, as in `state`.
"""

from __future__ import annotations

import getpass
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.base.errors import JobError
from launcher.base.units import counted
from launcher.contract.executor import SiteQuestion
from launcher.contract.site import time_s
from launcher_plugins.executors.slurm.commands import rows, run_command

_SHOW = ("sacctmgr", "-nP", "show")
_GPU = re.compile(r"\bgpu:(?:([A-Za-z][\w.-]*):)?(\d+)")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition, with its most frequent kind of node."""

    name: str
    is_default: bool
    max_time: str
    """In Slurm's format, such as ``1-00:00:00`` or ``UNLIMITED``."""
    num_nodes: int
    num_cpus: int
    """Of a node."""
    gpus: Mapping[str, int]
    """GPUs of a node by type; the type is empty where the cluster defines none."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a cluster reports about itself."""

    version: str
    can_requeue: bool
    has_gpus_option: bool
    """Whether ``--gpus-per-node`` is supported."""
    partitions: tuple[Partition, ...]
    accounts: tuple[str, ...]
    """Accounts of the user, the default one first; empty without accounting."""
    qos: tuple[str, ...]

    @property
    def facts(self) -> tuple[str, ...]:
        """What the reader should know, one line each."""
        lines = [f"Slurm {self.version}", *map(_partition_line, self.partitions)]
        if not self.can_requeue:
            lines.append("No job is requeued here: recipes need executor.continuation=chain, or none.")
        return tuple(lines)

    def question(self, answers: Mapping[str, str | None]) -> SiteQuestion | None:
        """The next setting to ask for, given the answers so far; None when there is none."""
        return next((found for found in _questions(self, answers) if found.setting not in answers), None)


def survey() -> Survey:
    """Asks the cluster.

    Raises:
        JobError: when it does not answer.
    """
    config = _output_of(("scontrol", "show", "config"))
    settings = dict(re.findall(r"^(\w+)\s*= (.*?)\s*$", config, re.MULTILINE))
    nodes = _output_of(("sinfo", "--noheader", "--format=%R|%G|%c|%D"))
    accounts, qos = _associations()
    return Survey(
        version=settings.get("SLURM_VERSION", "of an unknown version"),
        can_requeue=settings.get("JobRequeue") != "0",
        has_gpus_option=settings.get("SelectType") == "select/cons_tres",
        partitions=read_partitions(_output_of(("scontrol", "--oneliner", "show", "partition")), nodes),
        accounts=accounts,
        qos=qos,
    )


def read_partitions(text: str, nodes: str) -> tuple[Partition, ...]:
    """The partitions that accept jobs, from ``scontrol show partition`` and sinfo's ``%R|%G|%c|%D``.

    >>> text = "PartitionName=a Default=YES MaxTime=02:00:00 State=UP TotalNodes=4"
    >>> read_partitions(text, "a|gpu:h100:8(S:0-1)|64+|3")[0].gpus
    {'h100': 8}
    """
    kinds: dict[str, list[tuple[int, str, int]]] = {}
    for name, gres, cpus, count in rows(nodes, 4):
        kinds.setdefault(name, []).append((int(count), gres, int(cpus.rstrip("+"))))
    found = []
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if fields.get("State") != "UP":
            continue
        _, gres, num_cpus = max(kinds.get(fields["PartitionName"], [(0, "", 0)]))
        partition = Partition(
            name=fields["PartitionName"],
            is_default=fields.get("Default") == "YES",
            max_time=fields.get("MaxTime", "UNLIMITED"),
            num_nodes=int(fields.get("TotalNodes", 0)),
            num_cpus=num_cpus,
            gpus={kind: int(count) for kind, count in _GPU.findall(gres)},
        )
        found.append(partition)
    return tuple(found)


def _output_of(words: tuple[str, ...]) -> str:
    answer = run_command(words)
    if answer.code:
        raise JobError(f"Slurm does not answer: {answer.error}")
    return answer.output


def _associations() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The accounts of the user, the default one first, and the QOS that they may use."""
    user = getpass.getuser()
    try:
        default = run_command((*_SHOW, "user", user, "format=defaultaccount"))
        listed = run_command((*_SHOW, "associations", f"user={user}", "format=account,qos"))
    except JobError:  # no sacctmgr on this machine
        return (), ()
    if default.code or listed.code:  # no accounting on this cluster
        return (), ()
    found = list(rows(listed.output, 2))
    accounts = dict.fromkeys(
        [*filter(None, default.output.splitlines()[-1:]), *(account for account, _ in found)]
    )
    return tuple(accounts), tuple(sorted({name for _, names in found for name in names.split(",") if name}))


def _partition_line(partition: Partition) -> str:
    gpus = ", ".join(f"{count} {kind or 'GPUs'}" for kind, count in partition.gpus.items()) or "no GPU"
    default = " (the default)" if partition.is_default else ""
    limit = partition.max_time.lower()
    return (
        f"partition {partition.name}{default}: {counted(partition.num_nodes, 'node')} of "
        f"{partition.num_cpus} CPUs and {gpus}, jobs of at most {limit}"
    )


def _questions(found: Survey, answers: Mapping[str, str | None]) -> Iterator[SiteQuestion]:
    """Every setting that is asked for, in order, given the answers so far."""
    partitions = {partition.name: partition for partition in found.partitions}
    names = tuple(partitions)
    default = next((partition.name for partition in found.partitions if partition.is_default), None)
    proposal = default or (names[0] if len(names) == 1 else None)
    yield SiteQuestion(setting="partition", proposal=proposal, choices=names, is_required=bool(names))
    if found.accounts:
        yield SiteQuestion(setting="account", proposal=found.accounts[0], choices=found.accounts)
    if len(found.qos) > 1:
        yield SiteQuestion(setting="qos", proposal=None, choices=found.qos)
    partition = partitions.get(answers.get("partition") or default or "")
    longest = partition.max_time if partition else ""
    yield SiteQuestion(
        setting="time_limit", proposal=longest if math.isfinite(time_s(longest) or math.inf) else None
    )
    gpus = partition.gpus if partition else {}
    usual = "gres_typed" if len(gpus) > 1 else "gpus_per_node" if found.has_gpus_option else "gres"
    choices = ("gpus_per_node", "gres", "gres_typed", "none")
    yield SiteQuestion(setting="gpu_request", proposal=usual if gpus else "none", choices=choices)
    if answers.get("gpu_request") == "gres_typed":
        kinds = tuple(filter(None, gpus))
        proposal = kinds[0] if len(kinds) == 1 else None
        yield SiteQuestion(setting="gpu_type", proposal=proposal, choices=kinds, is_required=bool(kinds))
    yield SiteQuestion(setting="memory_per_node", proposal=None)
