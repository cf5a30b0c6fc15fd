"""Simulates a schedule: when every compute action runs, given its duration."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import itemgetter

from launcher.contract.actions import COMPUTE, Action, B, F, PipelineShape, W, has_weight_actions
from launcher.contract.plan import Plan, SchedulePlan
from launcher.schedule.dependencies import ABSENT, ActionLists, DependencyGraph

_KIND = itemgetter(1)
PENDING = -1.0
"""End of an action that has not run."""


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pauses the cyclic garbage collector; also a decorator. Can be nested.

    A large schedule is a million small tuples without a cycle. The collector would traverse all of them
    again and again while they are created, for a third of the whole time. Objects created meanwhile are
    moved to the oldest generation, or the next young collection would traverse them, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # moves all objects to the oldest generation
            gc.enable()


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that the parts of a step take."""

    forward_s: tuple[float, ...]
    """Forward of one microbatch, per stage."""
    backward_s: tuple[float, ...]
    """B of one microbatch, per stage: the whole backward, or the gradient of the input alone where the
    schedule splits it."""
    weight_s: tuple[float, ...] = ()
    """W of one microbatch, per stage: the weight gradients. Empty where the schedule has no W."""
    transfer_s: float = 0.0
    """One message between two ranks."""


def textbook_costs(shape: PipelineShape, *, splits_backward: bool) -> Costs:
    """Equal stages and free messages, each gradient as long as a forward.

    >>> textbook_costs(PipelineShape(num_pp_ranks=2), splits_backward=False)
    Costs(forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), weight_s=(), transfer_s=0.0)
    """
    ones, twos = (1.0,) * shape.num_stages, (2.0,) * shape.num_stages
    if splits_backward:
        return Costs(forward_s=ones, backward_s=ones, weight_s=ones)
    return Costs(forward_s=ones, backward_s=twos)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One simulated step; time counts from its start."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    """Per pp_rank: each compute action with its start and end in seconds."""
    makespan_s: float
    """End of the last action."""
    busy_s: tuple[float, ...]
    """Compute time of each pp_rank."""

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time: 1 - sum(busy) / (p * makespan)."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s)


@paused_gc()
def simulate(lists: ActionLists, shape: PipelineShape, costs: Costs | SchedulePlan) -> Timeline:
    """Runs validated lists against a clock.

    A W starts when its rank is free: its B comes before it in the list. A forward or backward starts when
    its rank is free and its input has arrived: `transfer_s` after its producer ended when that is on another
    rank, at once on the same. Sends do not block, and receives are taken to be posted in time.

    >>> from launcher.contract.actions import from_text
    >>> shape = PipelineShape(num_pp_ranks=2, num_microbatches=1)
    >>> lists = [from_text("0F0 0B0"), from_text("1F0 1B0")]
    >>> timeline = simulate(lists, shape, Costs(forward_s=(1, 1), backward_s=(2, 2), transfer_s=0.5))
    >>> timeline.makespan_s, timeline.busy_s
    (7.0, (3, 3))
    """
    compute = _compute_only(lists)
    assert bool(costs.weight_s) == has_weight_actions(lists), "weight_s goes with a schedule that has W"
    seconds = {F: costs.forward_s, B: costs.backward_s, W: costs.weight_s}
    durations = [[seconds[kind][stage] for stage, kind, _ in actions] for actions in compute]
    return _timeline(compute, shape, durations, costs.transfer_s)


def replay(
    lists: ActionLists, shape: PipelineShape, durations_s: Sequence[Sequence[float]], *, transfer_s: float
) -> Timeline:
    """Like `simulate`, with a time of its own for each compute action, such as a measured one.

    ``durations_s``: per pp_rank, the seconds of its compute actions in the order of its list.

    Raises:
        ValueError: when a rank's times are not as many as its compute actions.
    """
    compute = _compute_only(lists)
    for pp_rank, (actions, durations) in enumerate(zip(compute, durations_s, strict=True)):
        if len(actions) != len(durations):
            raise ValueError(f"pp_rank {pp_rank}: {len(durations)} times for {len(actions)} actions")
    return _timeline(compute, shape, durations_s, transfer_s)


def _compute_only(lists: ActionLists) -> list[list[Action]]:
    kinds = frozenset(COMPUTE)
    return [[action for action in actions if action[1] in kinds] for actions in lists]


def _timeline(
    compute: ActionLists, shape: PipelineShape, durations_s: Sequence[Sequence[float]], transfer_s: float
) -> Timeline:
    graph = DependencyGraph.of(compute, shape)
    starts, ends = _run(graph, list(chain.from_iterable(durations_s)), transfer_s)
    return Timeline(
        spans=tuple(
            tuple(zip(actions, starts[first:end], ends[first:end], strict=True))
            for actions, (first, end) in zip(compute, pairwise(graph.first), strict=True)
        ),
        makespan_s=max(ends),
        busy_s=tuple(map(sum, durations_s)),
    )


def peak_held(lists: ActionLists, shape: PipelineShape) -> tuple[int, ...]:
    """Per pp_rank, the most stage inputs held at once: from a forward to its backward, or to its W
    where the schedule splits the backward.

    >>> from launcher.contract.actions import from_text
    >>> shape = PipelineShape(num_pp_ranks=1, num_microbatches=3)
    >>> peak_held([from_text("0F0 0F1 0B0 0F2 0B1 0B2")], shape)
    (2,)
    >>> peak_held([from_text("0F0 0F1 0B0 0F2 0B1 0W0 0B2 0W1 0W2")], shape)
    (3,)
    """
    assert len(lists) == shape.num_pp_ranks, f"{len(lists)} lists for {shape.num_pp_ranks} pp_ranks"
    change = {F: 1, W if has_weight_actions(lists) else B: -1}
    if shape.num_frozen:  # stages that nothing is kept for
        lists = [[action for action in actions if action[0] >= shape.num_frozen] for actions in lists]
    changes = (filter(None, map(change.get, map(_KIND, actions))) for actions in lists)
    return tuple(max(accumulate(each), default=0) for each in changes)


def _run(
    graph: DependencyGraph, durations: list[float], transfer_s: float
) -> tuple[list[float], list[float]]:
    """Start and end of every action: each rank advances until it needs a result that is not available yet."""
    owner, producer = graph.owner, graph.producer
    starts, ends = [0.0] * len(durations), [PENDING] * len(durations)
    position, stop = graph.first[:-1], graph.first[1:]
    clocks = [0.0] * len(position)
    waiting: defaultdict[int, list[int]] = defaultdict(list)  # ranks, by the action whose result they need
    ready = list(range(len(position)))
    while ready:
        rank = ready.pop()
        here, end, clock = position[rank], stop[rank], clocks[rank]
        while here < end:
            source = producer[here]
            if source != ABSENT:
                arrival = ends[source]
                if arrival == PENDING:
                    waiting[source].append(rank)
                    break
                if owner[source] != rank:
                    arrival += transfer_s
                if arrival > clock:
                    clock = arrival
            starts[here] = clock
            clock += durations[here]
            ends[here] = clock
            if here in waiting:
                ready += waiting.pop(here)
            here += 1
        position[rank], clocks[rank] = here, clock
    assert position == stop, "the lists deadlock: validate them before simulating"
    return starts, ends


def planned_timeline(plan: Plan) -> Timeline:
    """When every action of a plan begins and ends, in seconds of its predicted costs."""
    return simulate(plan.lists, plan.pipeline, plan.schedule)
