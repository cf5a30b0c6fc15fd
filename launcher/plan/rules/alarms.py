"""Whether a job can take back a step, as an alarm asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.base.errors import Fault
from launcher.contract.strategy import Architecture, JobShape


def alarm_faults(job: JobShape, architecture: Architecture) -> Iterator[Fault]:
    """Actions that the ranks cannot take together, or that have nothing to go back to."""
    config = job.config
    for name in config.alarms.takes_back:
        path, action = f"alarms.{name}", getattr(config.alarms, name)
        neutral: dict[str, Any] = {path: "end"}
        if not architecture.takes_back:
            rule = f"is one decision of all ranks, and those of {config.architecture.name} do not step as one"
            yield Fault(path, action, rule, ways=(neutral,))
        elif action == "rewind" and not config.train.checkpoint_interval:
            rule = "goes back to a checkpoint, and train.checkpoint_interval is 0"
            ways = ({"train.checkpoint_interval": max(1, config.train.num_steps // 10)}, neutral)
            yield Fault(path, action, rule, ways=ways)
    if config.alarms.slow_rank == "end" and not all(role.trains for role in architecture.roles(job)):
        rule = f"compares times that ranks of {config.architecture.name} do not exchange"
        yield Fault("alarms.slow_rank", "end", rule, ways=({"alarms.slow_rank": "ignore"},))
