"""What a cluster says about itself, and what it leaves to a person: the questions of a new site.

Source: the manual pages scontrol(1), sinfo(1) and sacctmgr(1). Text is read, as in `slurm_state`.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.base.errors import JobError
from launcher.base.units import counted
from launcher.contract.executor import SiteQuestion
from launcher_plugins.executors.slurm.commands import ask

_TIME = re.compile(r"(\d+-)?\d{1,2}:[0-5]\d:[0-5]\d")
_GPU = re.compile(r"\bgpu:(?:([A-Za-z][\w.-]*):)?(\d+)")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition, and the nodes that it has most of."""

    name: str
    is_default: bool
    max_time: str
    """As Slurm writes it, such as ``1-00:00:00`` or ``UNLIMITED``."""
    num_nodes: int
    num_cpus: int
    """Of a node."""
    gpus: Mapping[str, int]
    """GPUs of a node by their type; the type is empty where the cluster names none."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The answers of a cluster."""

    version: str
    can_requeue: bool
    has_gpus_option: bool
    """Whether ``--gpus-per-node`` is understood."""
    partitions: tuple[Partition, ...]
    accounts: tuple[str, ...]
    """Of the person who asks, the default one first; empty without accounting."""
    qos: tuple[str, ...]

    @property
    def facts(self) -> tuple[str, ...]:
        """What a reader should know, each a line."""
        lines = [f"Slurm {self.version}", *map(_partition_line, self.partitions)]
        if not self.can_requeue:
            lines.append("No job is requeued here: recipes need executor.continuation=chain, or none.")
        return tuple(lines)

    def question(self, answers: Mapping[str, str | None]) -> SiteQuestion | None:
        """The next setting to ask for, given the answers so far; None when nothing is left open."""
        for setting, make in _QUESTIONS.items():
            if setting not in answers and (question := make(self, answers)) is not None:
                return question
        return None

    def partition(self, answers: Mapping[str, str | None]) -> Partition | None:
        """The partition that was chosen, else the default one."""
        chosen = answers.get("partition")
        of_name = (p for p in self.partitions if p.name == chosen or (chosen is None and p.is_default))
        return next(of_name, None)


def survey() -> Survey:
    """Asks the cluster.

    Raises:
        JobError: when it gives no answer.
    """
    settings = _settings(_told(("scontrol", "show", "config")))
    nodes = _told(("sinfo", "--noheader", "--format=%R|%G|%c|%D"))
    accounts, qos = _associations()
    return Survey(
        version=settings.get("SLURM_VERSION", "of an unknown version"),
        can_requeue=settings.get("JobRequeue") != "0",
        has_gpus_option=settings.get("SelectType") == "select/cons_tres",
        partitions=read_partitions(_told(("scontrol", "--oneliner", "show", "partition")), nodes),
        accounts=accounts,
        qos=qos,
    )


def read_partitions(text: str, nodes: str) -> tuple[Partition, ...]:
    """The partitions that take jobs, from ``scontrol show partition`` and sinfo's ``%R|%G|%c|%D``.

    >>> text = "PartitionName=a Default=YES MaxTime=02:00:00 State=UP TotalNodes=4"
    >>> read_partitions(text, "a|gpu:h100:8(S:0-1)|64+|3")[0].gpus
    {'h100': 8}
    """
    kinds: dict[str, list[tuple[int, str, int]]] = {}
    for line in nodes.splitlines():
        name, gres, cpus, count = line.split("|")
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


def _told(words: tuple[str, ...]) -> str:
    answer = ask(words, os.environ)
    if answer.code:
        raise JobError(f"Slurm says nothing about itself: {answer.error}")
    return answer.output


def _settings(text: str) -> dict[str, str]:
    """The lines ``Name = value`` of ``scontrol show config``."""
    return dict(re.findall(r"^(\w+)\s*= (.*?)\s*$", text, re.MULTILINE))


def _associations() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The accounts of the person, the default one first, and what qualities of service they may use."""
    user = f"user={getpass.getuser()}"
    try:
        default = ask(
            ("sacctmgr", "-nP", "show", "user", user.partition("=")[2], "format=defaultaccount"), os.environ
        )
        listed = ask(("sacctmgr", "-nP", "show", "associations", user, "format=account,qos"), os.environ)
    except JobError:  # no sacctmgr on this machine
        return (), ()
    if default.code or listed.code:  # no accounting on this cluster
        return (), ()
    rows = [line.split("|") for line in listed.output.splitlines()]
    accounts = dict.fromkeys([*filter(None, [default.output.strip()]), *(row[0] for row in rows)])
    return tuple(accounts), tuple(sorted({name for row in rows for name in row[1].split(",") if name}))


def _partition_line(partition: Partition) -> str:
    gpus = ", ".join(f"{count} {kind or 'GPUs'}" for kind, count in partition.gpus.items()) or "no GPU"
    default = " (the default)" if partition.is_default else ""
    limit = partition.max_time.lower()
    return (
        f"partition {partition.name}{default}: {counted(partition.num_nodes, 'node')} of "
        f"{partition.num_cpus} CPUs and {gpus}, jobs of at most {limit}"
    )


def _partition_question(found: Survey, answers: Mapping[str, str | None]) -> SiteQuestion:
    names = tuple(partition.name for partition in found.partitions)
    default = next((p.name for p in found.partitions if p.is_default), None)
    proposal = default or (names[0] if len(names) == 1 else None)
    return SiteQuestion(setting="partition", proposal=proposal, choices=names, is_required=bool(names))


def _account_question(found: Survey, answers: Mapping[str, str | None]) -> SiteQuestion | None:
    if not found.accounts:
        return None
    return SiteQuestion(setting="account", proposal=found.accounts[0], choices=found.accounts)


def _qos_question(found: Survey, answers: Mapping[str, str | None]) -> SiteQuestion | None:
    if len(found.qos) < 2:
        return None
    return SiteQuestion(setting="qos", proposal=None, choices=found.qos)


def _time_question(found: Survey, answers: Mapping[str, str | None]) -> SiteQuestion:
    partition = found.partition(answers)
    longest = partition.max_time if partition else ""
    return SiteQuestion(setting="time_limit", proposal=longest if _TIME.fullmatch(longest) else None)


def _gpu_question(found: Survey, answers: Mapping[str, str | None]) -> SiteQuestion:
    partition = found.partition(answers)
    gpus = partition.gpus if partition else {}
    proposal = "gpus_per_node" if found.has_gpus_option else "gres"
    if len(gpus) > 1:
        proposal = "gres_typed"
    choices = ("gpus_per_node", "gres", "gres_typed", "none")
    return SiteQuestion(setting="gpu_request", proposal=proposal if gpus else "none", choices=choices)


def _gpu_type_question(found: Survey, answers: Mapping[str, str | None]) -> SiteQuestion | None:
    if answers.get("gpu_request") != "gres_typed":
        return None
    partition = found.partition(answers)
    kinds = tuple(filter(None, partition.gpus)) if partition else ()
    proposal = kinds[0] if len(kinds) == 1 else None
    return SiteQuestion(setting="gpu_type", proposal=proposal, choices=kinds, is_required=bool(kinds))


def _memory_question(found: Survey, answers: Mapping[str, str | None]) -> SiteQuestion:
    return SiteQuestion(setting="memory_per_node", proposal=None)


_QUESTIONS = {
    "partition": _partition_question,
    "account": _account_question,
    "qos": _qos_question,
    "time_limit": _time_question,
    "gpu_request": _gpu_question,
    "gpu_type": _gpu_type_question,
    "memory_per_node": _memory_question,
}
"""Settings in the order in which they are asked for, and what makes the question."""
