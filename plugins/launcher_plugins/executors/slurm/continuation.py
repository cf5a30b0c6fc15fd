"""How a run continues after its time limit, a preemption or the loss of a node.

The shell code in ``slurm/`` does it; here are its settings, their faults, and the notes on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from launcher.base.errors import Fault, offer
from launcher.base.units import counted, format_duration
from launcher.contract.config import LaunchConfig
from launcher.contract.job import JobScript, needed_lead_s
from launcher.typed.read import read_unless, read_where, read_while
from launcher.typed.scalars import Fraction, NonNegativeInt, PositiveInt, Range
from launcher_plugins.executors.torchrun import restart_faults, restart_notes

_LEAD_S = 120
"""Seconds that ranks are given to save as long as nothing is measured."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Settings of the executor."""

    starter: Literal["srun", "torchrun"] = "srun"
    """``srun`` starts one task per rank; ``torchrun`` is started once per node and starts its ranks."""
    continuation: Literal["requeue", "chain", "none"] = "requeue"
    """How an interrupted run continues. ``requeue``: its job is requeued; ``chain``: it is submitted as
    ``max_starts`` jobs, each of which resumes from the one before; ``none``: it does not."""
    max_starts: PositiveInt = field(
        default=8, metadata=read_unless("executor.continuation", "none", neutral=1)
    )
    """Largest number of starts of the ranks, without those after a preemption or a node's crash; of a chain,
    its jobs."""
    max_node_failures: PositiveInt = field(default=5, metadata=read_while("executor.continuation", "requeue"))
    """Most starts in a row that end, as by the crash of a node, with no new checkpoint and neither by the run
    itself nor by a preemption; the run has failed then."""
    max_restarts: NonNegativeInt = 0
    """Restarts after a failure, from the newest intact checkpoint."""
    save_lead_s: Annotated[int, Range(minimum=0, maximum=65_535)] | None = field(
        default=None, metadata=read_unless("train.checkpoint_interval", 0, neutral=0)
    )
    """Seconds before the time limit at which the ranks are asked to save and stop; 0 = they are not; null =
    120, and more once the run has measured that its steps and saves take longer."""
    check_nodes: bool = field(
        default=True,
        metadata=read_where(
            "the job has one component", lambda roles: not roles, "site.roles", neutral=False
        ),
    )
    """Check each node before the ranks start: devices, memory, disks, clock, speed; not of a job of several
    components (``site.roles``)."""
    check_timeout_s: PositiveInt = field(default=120, metadata=read_while("executor.check_nodes", True))
    """Seconds that the check of the nodes may take; a node that has not answered by then is unfit."""
    min_node_speed: Fraction = field(default=0.5, metadata=read_while("executor.check_nodes", True))
    """Least speed of a node's matmul and exchange of data, as a fraction of what is usual on the others."""
    exclude_bad_nodes: bool = field(default=True, metadata=read_while("executor.check_nodes", True))
    """Have the job start again on other nodes than those that fail the check; else it fails."""

    def num_jobs(self) -> int:
        """Jobs that the run is submitted as."""
        return self.max_starts if self.continuation == "chain" else 1


def checks_nodes(config: LaunchConfig) -> bool:
    """Whether the nodes of a job are checked before the ranks start."""
    return config.executor.settings(SlurmConfig).check_nodes and not config.site.roles


def saves(config: LaunchConfig) -> bool:
    """Whether ranks that are asked to stop save first."""
    return config.train.checkpoint_interval > 0


def first_lead_s(config: LaunchConfig) -> int:
    """Seconds before the time limit at which the ranks are asked to stop, as long as nothing is measured; 0:
    they are not."""
    if not saves(config):
        return 0
    given = config.executor.settings(SlurmConfig).save_lead_s
    return int(min(_LEAD_S, config.site.time_limit_s // 4)) if given is None else given


def save_signal(config: LaunchConfig) -> str | None:
    """The value of sbatch's ``--signal``: the script is signalled before the time limit."""
    lead_s = first_lead_s(config)
    return f"B:USR1@{lead_s}" if lead_s else None


def lead_warnings(script: JobScript) -> Iterator[str]:
    """A sentence where a run is submitted again with a set lead that its saves take longer than."""
    found = re.search(r"^save_lead_s=(\d+)\nlead_is_set=yes$", script.text, re.MULTILINE)
    needed_s = needed_lead_s(Path(script.run_dir))
    if found and 0 < int(found[1]) < needed_s:
        yield (
            f"executor.save_lead_s={found[1]} is too short: as measured, the ranks need {needed_s} s to "
            f"save. Set executor.save_lead_s={needed_s}, or leave it out."
        )


def continuation_faults(config: LaunchConfig) -> Iterator[Fault]:
    """Settings under which the run could not continue, or would stop as soon as it starts."""
    settings, limit = config.executor.settings(SlurmConfig), config.site.time_limit
    limit_s = config.site.time_limit_s
    if settings.save_lead_s and save_signal(config) and limit_s <= settings.save_lead_s:
        rule = f"the ranks would be asked to stop as they start, since site.time_limit is {limit}"
        ways = ({"executor.save_lead_s": int(limit_s // 4)},)
        fix = f"{offer(ways)[:-1]}, or a longer site.time_limit."
        yield Fault("executor.save_lead_s", settings.save_lead_s, rule, fix, ways=ways)
    if settings.continuation == "chain" and not saves(config):
        rule = "a job would have nothing to resume from, since train.checkpoint_interval is 0"
        ways = ({"train.checkpoint_interval": max(1, config.train.num_steps // 10)},)
        yield Fault("executor.continuation", "chain", rule, ways=ways)
    if config.cluster.spare_nodes and not checks_nodes(config):
        rule = "spare nodes take the place of those that fail the check of nodes"
        without: dict[str, bool | int] = {"cluster.spare_nodes": 0}
        checked: dict[str, bool | int] = {"executor.check_nodes": True}
        if config.site.roles:
            rule += ", which a job of several components has not"
        ways_out = (without,) if config.site.roles else (checked, without)
        yield Fault("cluster.spare_nodes", config.cluster.spare_nodes, rule, ways=ways_out)
    yield from restart_faults(config, settings.max_restarts)
    most = settings.max_starts - 1
    rule = f"there are at most executor.max_starts={settings.max_starts} starts"
    if settings.continuation == "none":
        rule, most = "nothing starts the ranks again with executor.continuation=none", 0
    if settings.max_restarts > most:
        ways = ({"executor.max_restarts": most},)
        yield Fault("executor.max_restarts", settings.max_restarts, rule, ways=ways)


def continuation_notes(config: LaunchConfig) -> Iterator[str]:
    """How and when the run is started again."""
    settings = config.executor.settings(SlurmConfig)
    lead_s = first_lead_s(config)
    more = " or more" if settings.save_lead_s is None else ""
    at_limit = f"{lead_s} s{more} before its time limit, when the ranks have saved"
    if settings.continuation == "none":
        yield "Nothing starts the run again when it is interrupted (executor.continuation=none)."
    elif settings.continuation == "chain":
        end = at_limit if lead_s else "at its time limit, without a signal to the ranks"
        yield (
            f"It is submitted as {settings.max_starts} jobs. The first ends {end}, and the next goes "
            "on; those that are not needed are cancelled, and nothing is requeued, so each job counts, "
            "whatever has ended it (executor.continuation=chain)."
        )
    else:
        is_endless = config.site.time_limit is not None and math.isinf(config.site.time_limit_s)
        own = f", and its own script {at_limit}" if save_signal(config) and not is_endless else ""
        yield (
            f"Slurm requeues the job after a preemption and when a node fails{own}: at most "
            f"{settings.max_starts} starts, not counting those after a preemption or a node's failure "
            "(executor.max_starts). The run has failed after "
            f"{counted(settings.max_node_failures, 'start')} in a row that nodes ended before anything more "
            "was saved (executor.max_node_failures)."
        )
        if not saves(config):
            yield (
                "Since train.checkpoint_interval is 0, a requeued job starts from the beginning, and nothing "
                "is saved at its end."
            )
    if spare := config.cluster.spare_nodes:
        yield (
            f"{counted(config.cluster.nodes + spare, 'node')} are reserved: {spare} of them for nodes that "
            "fail the check before a start, or crash (cluster.spare_nodes)."
        )
    yield from restart_notes(config, settings.max_restarts)


def next_start(config: LaunchConfig, num_starts: int) -> str:
    """What goes on with the run when its start of this number is interrupted; empty: nothing does."""
    settings = config.executor.settings(SlurmConfig)
    if settings.continuation == "none":
        return ""
    if num_starts >= settings.max_starts:
        return f"this is the last of executor.max_starts = {settings.max_starts} starts"
    who = "its job is requeued" if settings.continuation == "requeue" else "the next job of its chain goes on"
    return f"if it is interrupted, {who}: start {num_starts + 1} of at most {settings.max_starts}"


def time_notes(config: LaunchConfig, predicted_s: float) -> Iterator[str]:
    """A note where the time limit may be meant otherwise, or ends the run before it can finish."""
    settings, limit = config.executor.settings(SlurmConfig), config.site.time_limit
    limit_s = config.site.time_limit_s
    if limit and limit.replace(":", "").isdecimal() and limit.count(":") < 2 and math.isfinite(limit_s):
        unit = "minutes and seconds" if ":" in limit else "minutes"
        yield f"site.time_limit={limit} is {format_duration(limit_s)}: Slurm reads it as {unit}."
    goes_on = {"requeue": save_signal(config) is not None, "chain": True, "none": False}
    num_starts = settings.max_starts if goes_on[settings.continuation] else 1
    if predicted_s <= num_starts * limit_s:
        return
    if num_starts > 1:
        rest = f"{num_starts} starts (executor.max_starts) of {limit} each (site.time_limit) are not enough"
    else:
        missing = {
            "executor.continuation=requeue": settings.continuation == "none",
            "a train.checkpoint_interval": not saves(config),
            "an executor.save_lead_s": settings.save_lead_s == 0 and settings.continuation != "chain",
            "a larger executor.max_starts": settings.max_starts == 1,
        }
        needed = " and ".join(what for what, is_missing in missing.items() if is_missing)
        rest = f"it is ended after site.time_limit = {limit}: going on takes {needed}"
    yield f"The run is predicted to take about {format_duration(predicted_s)}, and {rest}."
