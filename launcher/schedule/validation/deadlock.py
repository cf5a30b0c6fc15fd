"""Finds deadlocks, and under which kind of sends they occur.

- Buffered: a send returns at once, so only a forward or backward waits, for its message. A deadlock here
  is due to the order of compute, and occurs with any kind of sends.
- Blocking: a send returns when its receive has been posted. A deadlock only here is fixed by posting
  receives earlier.
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.contract.actions import COMPUTE
from launcher.schedule.dependencies import ABSENT, ActionLists, DependencyGraph
from launcher.schedule.validation.violation import Violation

_ALWAYS, _BLOCKING = "deadlock even with buffered sends", "deadlock with blocking sends"


def find_deadlock(lists: ActionLists, graph: DependencyGraph) -> Iterator[Violation]:
    """The ranks of a deadlock, if there is one under either kind of sends.

    ``lists`` must be complete and in order on every rank. A list free of deadlock under blocking
    sends is free of it under buffered ones, so these are tried only where those fail.
    """
    blocking = _waits(graph, sends_block=True)
    blocked_at = _run(graph, blocking)
    if blocked_at == graph.first[1:]:
        return
    buffered = _waits(graph, sends_block=False)
    buffered_at = _run(graph, buffered)
    if buffered_at != graph.first[1:]:
        yield from _violations(lists, graph, buffered, buffered_at, _ALWAYS)
    else:
        yield from _violations(lists, graph, blocking, blocked_at, _BLOCKING)


def _violations(
    lists: ActionLists, graph: DependencyGraph, waits_for: list[int], position: list[int], kind: str
) -> Iterator[Violation]:
    """Who waits for whom, rank by rank around the cycle."""
    for pp_rank in _cycle(position, waits_for, graph):
        here, needed = position[pp_rank], waits_for[position[pp_rank]]
        other = graph.owner[needed]
        action = lists[pp_rank][here - graph.first[pp_rank]]
        awaited = lists[other][needed - graph.first[other]]
        blocked = lists[other][position[other] - graph.first[other]]
        verb = "send" if action.kind in COMPUTE else "post"
        yield Violation(
            pp_rank=pp_rank,
            index=here - graph.first[pp_rank],
            rule=f"{kind}: waits for pp_rank {other} to {verb} {awaited}, which comes after {blocked} there",
            fix=f"Let pp_rank {other} {verb} {awaited} before {blocked}.",
        )


def _waits(graph: DependencyGraph, *, sends_block: bool) -> list[int]:
    """For each action, the one on another rank that must have been reached first, or `ABSENT`.

    A forward or backward waits for its message to be sent; a send that blocks, for its receive.
    """
    waits_for = [ABSENT] * len(graph.owner)
    for send, receive, consumer in graph.messages():
        if send != ABSENT:
            waits_for[consumer] = send
            if sends_block:
                waits_for[send] = receive
    return waits_for


def _run(graph: DependencyGraph, waits_for: list[int]) -> list[int]:
    """Advances every rank until none can advance; the position of each then."""
    owner, position = graph.owner, graph.first[:-1]
    waiting: dict[int, int] = {}  # the rank that waits, by the action that another one has to reach
    ready = list(range(len(position)))
    while ready:
        rank = ready.pop()
        while (here := position[rank]) < graph.first[rank + 1]:
            if here in waiting:
                ready.append(waiting.pop(here))
            needed = waits_for[here]
            if needed != ABSENT and position[owner[needed]] < needed:
                waiting[needed] = rank
                break
            position[rank] += 1
    return position


def _cycle(position: list[int], waits_for: list[int], graph: DependencyGraph) -> list[int]:
    """The ranks of one cycle of waiting, each waiting for the next.

    No rank waits for one that has finished, so following the waits from a blocked rank always leads to
    another blocked rank, and finally around a cycle.
    """
    rank = next(rank for rank, end in enumerate(graph.first[1:]) if position[rank] < end)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = graph.owner[waits_for[position[rank]]]
    return path[path.index(rank) :]
