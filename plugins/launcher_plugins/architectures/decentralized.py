"""No server: the ranks that train own the parameters and agree on gradients among themselves."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.interfaces import Fault, JobShape, RoleGroup


class Decentralized:
    """Synchronous training; every replica applies the same update to the same parameters."""

    runtime = "launcher_plugins.architectures.decentralized_runtime:update"
    exact = True

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Every mesh can train this way."""
        return ()

    def roles(self, job: JobShape) -> tuple[RoleGroup, ...]:
        """Trainers only."""
        return (RoleGroup(name="trainer", num_ranks=job.mesh.num_ranks, trains=True),)
