"""From a schedule's compute actions to the action lists that the ranks execute.

Where the messages go:

- A send comes right after the action that produces what is sent.
- A receive is posted `depth` compute actions ahead of its consumer. At depth 0 it comes right before
  it; a rank that runs 1F1B would then block in the send of a forward while its neighbour blocks in the
  send of a backward, each waiting for the other to post a receive. `smallest_depth` finds the depth that
  suffices (1F1B: 1, interleaved: 2); `OVERLAP_DEPTH` hides transfers.
- The receives from one rank are posted in the order in which that rank sends, even where they are
  needed in another order. So a backend may match messages by order (NCCL has no tags) as well as by tag.
  Where both directions share one queue, as on one NCCL communicator, two ranks that both post early
  would block each other: give each direction a communicator of its own.

Buffers: a message's buffer belongs to one (stage, kind, microbatch) from the posting of its receive
until the last backward that uses it, so no two pending receives share one. Posting early costs the
buffers of the receives pending at once, at most depth + 1 unless the order above requires more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import Any, TypeVar

from launcher.base.errors import Fault, PlanError, PluginError
from launcher.contract.actions import RB, RF, SB, SF, Action, F, PipelineShape
from launcher.contract.strategy import Schedule
from launcher.schedule.dependencies import ABSENT, ActionLists, DependencyGraph
from launcher.schedule.simulate import paused_gc
from launcher.schedule.validation.validate import validate, validate_compute

T = TypeVar("T")
_new = tuple.__new__  # takes half the time of Action(...), which counts with a call per message
OVERLAP_DEPTH = 2
"""Least depth used, so that transfers overlap with compute.

At depth 0 a transfer starts when its consumer is due. At depth d it has the d actions before it to
run in: by simulation with backwards twice as long as forwards, depth 1 makes the step as short as
any depth can while a transfer takes up to one forward, and depth 2 up to one and a half.
"""


@paused_gc()
def lower(schedule: Schedule, shape: PipelineShape) -> tuple[tuple[Action, ...], ...]:
    """The complete and validated actions of every pp_rank.

    Raises:
        PlanError: when the schedule refuses the shape, or its lists cannot run.
        PluginError: when it returns anything but faults and actions.
    """
    if faults := schedule_faults(schedule, shape):
        raise PlanError(faults)
    compute = [
        _all(Action, schedule.actions(shape, pp_rank), f"{_name(schedule)}.actions of pp_rank {pp_rank}")
        for pp_rank in range(shape.num_pp_ranks)
    ]
    is_split = schedule.splits_backward
    graph = validate_compute(compute, shape, splits_backward=is_split)
    deadline = deadlines(graph)
    depth = max(OVERLAP_DEPTH, smallest_depth(graph, deadline))
    lists = with_messages(compute, graph, deadline, depth)
    validate(lists, shape, splits_backward=is_split)
    return lists


def schedule_faults(schedule: Schedule, shape: PipelineShape) -> tuple[Fault, ...]:
    """The faults that a schedule finds in a shape.

    Raises:
        PluginError: when it returns anything but faults.
    """
    return _all(Fault, schedule.check(shape), f"{_name(schedule)}.check")


def _name(schedule: Schedule) -> str:
    return f"{type(schedule).__module__}:{type(schedule).__qualname__}"


def _all(kind: type[T], found: Any, where: str) -> tuple[T, ...]:
    """What a plugin returned, checked to be objects of one kind.

    >>> _all(Action, "0F0", "mine:Mine.actions of pp_rank 0")
    Traceback (most recent call last):
    launcher.base.errors.PluginError: mine:Mine.actions of pp_rank 0 gave '0', which is no Action
    """
    if not isinstance(found, Iterable):
        raise PluginError(f"{where} gave {found!r}: it has to yield or return each {kind.__name__}, if any")
    items = tuple(found)
    if set(map(type, items)) - {kind}:
        for item in items:
            if not isinstance(item, kind):
                raise PluginError(f"{where} gave {item!r}, which is no {kind.__name__}")
    return items


def with_messages(
    compute: ActionLists, graph: DependencyGraph, deadline: list[int], depth: int
) -> tuple[tuple[Action, ...], ...]:
    """The lists with a send after every producer, and every receive ``depth`` compute actions ahead."""
    incoming: list[list[int]] = [[] for _ in compute]
    for sender, needed in enumerate(deadline):
        if needed != ABSENT:
            incoming[graph.owner[needed]].append(sender)
    producers = list(chain.from_iterable(compute))
    lists = []
    for start, actions, senders in zip(graph.first, compute, incoming, strict=False):
        senders.sort(key=deadline.__getitem__)  # equal deadlines keep the order of the sends
        receives = [
            _new(Action, (stage + 1, RF, microbatch) if kind == F else (stage - 1, RB, microbatch))
            for stage, kind, microbatch in map(producers.__getitem__, senders)
        ]
        due = [deadline[sender] - depth for sender in senders]
        due.append(start + len(actions))  # never: there is always a next one to compare with
        next_due = 0
        complete: list[Action] = []
        for index, action in enumerate(actions, start):
            while due[next_due] <= index:
                complete.append(receives[next_due])
                next_due += 1
            complete.append(action)
            if deadline[index] != ABSENT:
                stage, kind, microbatch = action
                complete.append(_new(Action, (stage, SF if kind == F else SB, microbatch)))
        lists.append(tuple(complete))
    return tuple(lists)


def deadlines(graph: DependencyGraph) -> list[int]:
    """For each action that sends, the action before which the receive must be posted, or `ABSENT`.

    That is the consumer, or an earlier action of its rank that needs a message which the same rank
    sends later: posted by these deadlines, receives are in the order of their sends.
    """
    owner, deadline = graph.owner, [ABSENT] * len(graph.owner)
    for rank, (first, end) in enumerate(pairwise(graph.first)):
        soonest: dict[int, int] = {}
        for sender in range(end - 1, first - 1, -1):
            consumer = graph.consumer[sender]
            if consumer != ABSENT and owner[consumer] != rank:
                receiver = owner[consumer]
                soonest[receiver] = deadline[sender] = min(consumer, soonest.get(receiver, consumer))
    return deadline


def smallest_depth(graph: DependencyGraph, deadline: list[int]) -> int:
    """The least depth at which the lists run to the end with sends that block until received.

    Runs them without a clock: each rank advances until it waits for a message or blocks in a send.
    When all ranks are blocked, receives are posted one action earlier and the run continues from there
    (posting earlier undoes nothing). Lists with a cyclic dependency are blocked at every depth; the depth
    returned is then beyond the longest list, and `validate` names the cycle.

    >>> from launcher.contract.actions import PipelineShape, from_text
    >>> one_f_one_b = [from_text("0F0 0F1 0B0 0F2 0B1 0B2"), from_text("1F0 1B0 1F1 1B1 1F2 1B2")]
    >>> graph = DependencyGraph.of(one_f_one_b, PipelineShape(num_pp_ranks=2, num_microbatches=3))
    >>> smallest_depth(graph, deadlines(graph))
    1
    """
    position, stop = graph.first[:-1], graph.first[1:]
    is_computed = bytearray(len(graph.owner))
    longest = max(end - first for first, end in zip(position, stop, strict=True))
    depth = 0
    while depth <= longest:
        _advance(graph, deadline, depth, position, is_computed)
        if position == stop:
            break
        depth += 1
    return depth


def _advance(
    graph: DependencyGraph, deadline: list[int], depth: int, position: list[int], is_computed: bytearray
) -> None:
    """Advances every rank as far as it can.

    A rank at an action has finished the sends of the actions before it and posted every receive that is
    due within ``depth`` actions. The action may be computed already, and blocked in its send.
    """
    owner, producer = graph.owner, graph.producer
    ready = list(range(len(position)))
    reached: defaultdict[int, list[int]] = defaultdict(list)
    """The ranks that wait, by the action that another one has to reach."""
    computed: defaultdict[int, list[int]] = defaultdict(list)
    """Likewise, by the one that has to be computed."""
    while ready:
        rank = ready.pop()
        while (here := position[rank]) < graph.first[rank + 1]:
            ready += reached.pop(here, ())
            if not is_computed[here]:
                source = producer[here]
                if source != ABSENT and not is_computed[source]:
                    computed[source].append(rank)
                    break
                is_computed[here] = True
                ready += computed.pop(here, ())
            needed = deadline[here]
            if needed != ABSENT and position[owner[needed]] < needed - depth:
                reached[needed - depth].append(rank)
                break
            position[rank] += 1
