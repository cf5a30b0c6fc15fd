"""Process groups from the mesh: the group of every axis that this rank is a member of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from launcher.plan.model import RankPlan


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks along some axes that share this rank's other coordinates."""

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    rank: int
    """This rank's place in ``ranks``."""
    handle: dist.ProcessGroup | None
    """None for a group of one: nothing to talk to."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Every group of one trainer rank."""

    pp: Group
    """Its handle carries the messages to higher pp_ranks."""
    pp_up: Group
    """The same ranks; its handle carries the messages to lower pp_ranks."""
    dp: Group
    tp: Group
    model: Group
    """All ranks of one replica: pp x tp."""
    world: Group
    """All trainer ranks."""
    tied: Group
    """This rank's partners on the first and last stage that hold copies of tied weights."""


def backend(device: torch.device) -> str:
    """The communication library for a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def make_groups(plan: RankPlan, timeout_s: float) -> Groups:
    """Creates all groups. Collective: every trainer rank calls it, in the same order."""
    mesh = plan.plan.mesh
    timeout = timedelta(seconds=timeout_s)

    def along(axes: str | Iterable[str]) -> Group:
        return _group(mesh.groups(axes), plan.rank, timeout)

    first, last = plan.plan.stages[0].pp_rank, plan.plan.stages[-1].pp_rank
    tied = []
    for ranks in mesh.groups("pp"):
        holders = tuple(rank for rank in ranks if mesh.coordinates(rank).pp in (first, last))
        tied += [holders, *((rank,) for rank in ranks if rank not in holders)]
    return Groups(
        pp=along("pp"),
        pp_up=along("pp"),
        dp=along("dp"),
        tp=along("tp"),
        model=along(("pp", "tp")),
        world=along(("pp", "dp", "tp")),
        tied=_group(tied, plan.rank, timeout),
    )


def _group(partition: Iterable[tuple[int, ...]], rank: int, timeout: timedelta) -> Group:
    mine: Group | None = None
    for ranks in partition:
        handle = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Group(ranks=ranks, rank=ranks.index(rank), handle=handle)
    assert mine is not None, f"rank {rank} is in no group"
    return mine
