"""Process groups from the mesh: the group of every axis that this rank is a member of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import cast

import torch.distributed as dist

from launcher.contract.plan import Plan, RankPlan


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks along some axes that share this rank's other coordinates."""

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    rank: int
    """This rank's index in ``ranks``."""
    handle: dist.ProcessGroup | None
    """None for a group of one, which needs no communication."""

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
    tied: Group
    """The ranks of the first and the last stage that share tied weights, when this is one of them
    and there are any; else this rank alone."""


def single_rank_groups(rank: int) -> Groups:
    """The groups of a rank that is not on the mesh, each of itself alone."""
    return Groups(**dict.fromkeys(Groups.__dataclass_fields__, Group(ranks=(rank,), rank=0, handle=None)))


def backend(plan: Plan) -> str:
    """The torch.distributed backend of a run; two where some roles have no GPU."""
    if plan.config.device.kind == "cpu":
        return "gloo"
    return "nccl" if all(role.trains for role in plan.roles) else "cpu:gloo,cuda:nccl"


def new_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A process group of this rank and others. Collective over ``ranks`` alone."""
    timeout = timedelta(seconds=timeout_s)
    return cast(
        dist.ProcessGroup, dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    )


def make_groups(plan: RankPlan, timeout_s: float) -> Groups:
    """Creates all groups of this rank. Every rank makes its own in the same order of axes."""
    mesh, rank = plan.plan.mesh, plan.rank

    def make(ranks: tuple[int, ...]) -> Group:  # the ranks that are not in it need not take part
        handle = new_group(ranks, timeout_s) if len(ranks) > 1 else None
        return Group(ranks=ranks, rank=ranks.index(rank), handle=handle)

    down, up = (make(mesh.group("pp", rank)) for _ in range(2))
    shared = cache(make)  # groups of the same ranks can be one, but for those of the messages
    return Groups(
        pp=down,
        pp_up=up,
        dp=shared(mesh.group("dp", rank)),
        tp=shared(mesh.group("tp", rank)),
        model=shared(mesh.group(("pp", "tp"), rank)),
        tied=shared(_tied_ranks(plan)),
    )


def _tied_ranks(plan: RankPlan) -> tuple[int, ...]:
    whole, mesh = plan.plan, plan.plan.mesh
    ends = {whole.stages[0].pp_rank, whole.stages[-1].pp_rank}
    holders = tuple(r for r in mesh.group("pp", plan.rank) if mesh.coordinates(r).pp in ends)
    is_tied = whole.config.model.family != "custom" and whole.config.model.tied_embeddings
    return holders if is_tied and plan.rank in holders else (plan.rank,)
