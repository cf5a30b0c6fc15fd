"""What ``executor.max_restarts`` means, whoever makes the new start."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.config.schema import LaunchConfig
from launcher.errors import Fault
from launcher.units import counted, format_duration


def restart_faults(config: LaunchConfig, max_restarts: int) -> Iterator[Fault]:
    """Starts after a failure that would have nothing to go on from."""
    if max_restarts and not config.train.checkpoint_interval:
        rule = "a new start would have nothing to go on from, as train.checkpoint_interval is 0"
        fix = f"Set train.checkpoint_interval={max(1, config.train.num_steps // 10)}, or "
        yield Fault("executor.max_restarts", max_restarts, rule, f"{fix}executor.max_restarts=0.")


def restart_notes(config: LaunchConfig, max_restarts: int) -> Iterator[str]:
    """How long it takes at most until a run that cannot go on has failed."""
    if max_restarts:
        timeout_s, start_s, starts = config.run.timeout_s, config.run.start_timeout_s, max_restarts + 1
        yield (
            f"After a failure the ranks are started again from the newest good checkpoint, at most "
            f"{counted(max_restarts, 'time')} (executor.max_restarts). A run that hangs each time has failed "
            f"after {starts} times {timeout_s:g} s (run.timeout_s) without progress: "
            f"{format_duration(starts * timeout_s)}; where it never makes a step, after {starts} times "
            f"{start_s:g} s (run.start_timeout_s): {format_duration(starts * start_s)}."
        )
