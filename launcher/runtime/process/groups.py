"""Process groups from the mesh: the group of every axis that this rank is a member of."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from launcher.contract.plan import Plan, RankPlan


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
    tied: Group
    """The ranks of the first and the last stage that share tied weights, when this is one of them
    and there are any; else this rank alone."""


def alone(rank: int) -> Groups:
    """The groups of a rank that is not on the mesh: itself."""
    return Groups(**dict.fromkeys(Groups.__dataclass_fields__, Group(ranks=(rank,), rank=0, handle=None)))


def backend(plan: Plan) -> str:
    """The communication library of a run; two where some roles have no GPU."""
    if plan.config.device.kind == "cpu":
        return "gloo"
    return "nccl" if all(role.trains for role in plan.roles) else "cpu:gloo,cuda:nccl"


def make_groups(plan: RankPlan, timeout_s: float) -> Groups:
    """Creates all groups of this rank. Every rank makes its own in the same order of axes."""
    mesh, rank = plan.plan.mesh, plan.rank
    maker = _Maker(rank, timedelta(seconds=timeout_s))
    down, up = (maker.make(mesh.group("pp", rank)) for _ in range(2))
    maker.shares = True  # from here on equal members can use one group; messages keep theirs
    return Groups(
        pp=down,
        pp_up=up,
        dp=maker.make(mesh.group("dp", rank)),
        tp=maker.make(mesh.group("tp", rank)),
        model=maker.make(mesh.group(("pp", "tp"), rank)),
        tied=maker.make(_tied_ranks(plan)),
    )


def _tied_ranks(plan: RankPlan) -> tuple[int, ...]:
    whole, mesh = plan.plan, plan.plan.mesh
    ends = {whole.stages[0].pp_rank, whole.stages[-1].pp_rank}
    holders = tuple(r for r in mesh.group("pp", plan.rank) if mesh.coordinates(r).pp in ends)
    is_tied = whole.config.model.family != "custom" and whole.config.model.tied_embeddings
    return holders if is_tied and plan.rank in holders else (plan.rank,)


@dataclass
class _Maker:
    """Makes groups of which this rank is a member; the other ranks need not take part."""

    rank: int
    timeout: timedelta
    shares: bool = False
    _made: dict[tuple[int, ...], Group] = field(default_factory=dict)

    def make(self, ranks: tuple[int, ...]) -> Group:
        if self.shares and ranks in self._made:
            return self._made[ranks]
        handle = None
        if len(ranks) > 1:
            handle = dist.new_group(list(ranks), timeout=self.timeout, use_local_synchronization=True)
        group = Group(ranks=ranks, rank=ranks.index(self.rank), handle=handle)
        if self.shares:
            self._made[ranks] = group
        return group
