"""Whether action lists can run: complete, in order, every message matched, no deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from operator import itemgetter

from launcher.contract.actions import RB, RF, SB, SF, B, F, PipelineShape, W
from launcher.schedule.dependencies import ABSENT, ActionLists, DependencyGraph
from launcher.schedule.validation.deadlock import find_deadlock
from launcher.schedule.validation.inventory import Inventory
from launcher.schedule.validation.violation import ScheduleError, Violation

ORDERED = ((F, B), (B, W), (RF, F), (F, SF), (RB, B), (B, SB))
"""(earlier, later): kinds of one stage and microbatch that must be in this order on their rank."""


def validate(lists: ActionLists, shape: PipelineShape, *, splits_backward: bool = False) -> None:
    """Checks complete action lists.

    Every microbatch runs F and B once per stage, and W exactly where the schedule splits the
    backward; every action comes after what it needs on its rank; every message has one send and
    one receive, and the receives from one rank are posted in the order of its sends; no rank deadlocks,
    even when each send blocks until the matching receive is posted.

    Raises:
        PlanError: with all faults of the first of these checks that fails, and the lists around them
            with the wrong actions marked.
    """
    complete = Inventory(shape=shape, splits_backward=splits_backward, has_messages=True)
    _require(lists, complete.check(lists))
    graph = DependencyGraph.of(lists, shape)
    _require(lists, chain(_order(lists, graph), _message_order(lists, graph)))
    _require(lists, find_deadlock(lists, graph))


def validate_compute(
    compute: ActionLists, shape: PipelineShape, *, splits_backward: bool = False
) -> DependencyGraph:
    """Checks the compute actions that a schedule returns, and returns their dependency graph.

    Raises:
        PlanError: when one is missing, repeated, on the wrong rank, or before what it needs.
    """
    complete = Inventory(shape=shape, splits_backward=splits_backward, has_messages=False)
    _require(compute, complete.check(compute))
    graph = DependencyGraph.of(compute, shape)
    _require(compute, _order(compute, graph))
    return graph


def _require(lists: ActionLists, violations: Iterator[Violation]) -> None:
    if found := list(violations):
        raise ScheduleError(lists, found)


def _order(lists: ActionLists, graph: DependencyGraph) -> Iterator[Violation]:
    """The first action of each rank that comes before what it needs on the same rank."""
    pairs = [
        (needed, early)
        for earlier, later in ORDERED
        for needed, early in zip(graph.index[earlier], graph.index[later], strict=True)
        if needed > early != ABSENT
    ]
    if len(lists) == 1:  # only with one rank are neighbouring stages on the same rank
        pairs += [(source, target) for target, source in enumerate(graph.producer) if source > target]
    reported: set[int] = set()
    for needed, early in sorted(pairs, key=itemgetter(1)):
        pp_rank = graph.owner[early]
        if pp_rank not in reported:
            reported.add(pp_rank)
            actions, first = lists[pp_rank], graph.first[pp_rank]
            yield Violation(
                pp_rank=pp_rank,
                index=early - first,
                rule=f"needs {actions[needed - first]}, which comes later, at action {needed - first}",
                fix=f"Put {actions[needed - first]} before it.",
            )


def _message_order(lists: ActionLists, graph: DependencyGraph) -> Iterator[Violation]:
    """The first receive from each rank that is posted before one whose message is sent earlier."""
    for (sender, pp_rank), receive_of in graph.channels().items():
        receives = [receive_of[send] for send in sorted(receive_of)]
        for earlier, receive in pairwise(receives):
            if receive < earlier:
                actions, first = lists[pp_rank], graph.first[pp_rank]
                wrong, other = actions[receive - first], actions[earlier - first]
                yield Violation(
                    pp_rank=pp_rank,
                    index=receive - first,
                    rule=f"is posted before {other}, whose message pp_rank {sender} sends first; receives "
                    "from one rank are posted in the order of its sends",
                    fix=f"Put {other} before {wrong}.",
                )
                break
