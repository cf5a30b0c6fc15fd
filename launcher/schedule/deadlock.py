"""Finds ranks that would wait for each other for ever."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.schedule.actions import COMPUTE
from launcher.schedule.finding import Finding
from launcher.schedule.flow import ABSENT, Flow, Lists


def find_deadlock(lists: Lists, flow: Flow) -> Iterator[Finding]:
    """The ranks of a circle of waiting, when each send blocks until its receive is posted.

    ``lists`` must be complete and in order on every rank. A list free of deadlock under such sends
    is free of it under sends that return at once, too.
    """
    waits_for = _waits(flow)
    position = _run(flow, waits_for)
    for pp_rank in _circle(position, waits_for, flow):
        here, needed = position[pp_rank], waits_for[position[pp_rank]]
        other = flow.owner[needed]
        action = lists[pp_rank][here - flow.first[pp_rank]]
        awaited = lists[other][needed - flow.first[other]]
        blocked = lists[other][position[other] - flow.first[other]]
        verb = "send" if action.kind in COMPUTE else "post"
        yield Finding(
            pp_rank=pp_rank,
            index=here - flow.first[pp_rank],
            given=str(action),
            rule=f"deadlock: waits for pp_rank {other} to {verb} {awaited}, "
            f"which stands behind {blocked} there",
            fix=f"Let pp_rank {other} {verb} {awaited} before {blocked}.",
        )


def _waits(flow: Flow) -> list[int]:
    """For each action, the one on another rank that must have been reached first, or `ABSENT`.

    A send waits for its receive to be posted; a forward or backward for its message to be sent.
    """
    waits_for = [ABSENT] * len(flow.owner)
    for send, receive, consumer in flow.messages():
        if send != ABSENT:
            waits_for[send] = receive
            waits_for[consumer] = send
    return waits_for


def _run(flow: Flow, waits_for: list[int]) -> list[int]:
    """Lets every rank go on until none can; where each stands then."""
    owner, stop = flow.owner, flow.first[1:]
    position = flow.first[:-1]
    before: list[int] = []
    while position != before:
        before = list(position)
        for rank, end in enumerate(stop):
            here = position[rank]
            while here < end:
                needed = waits_for[here]
                if needed != ABSENT and position[owner[needed]] < needed:
                    break
                here += 1
            position[rank] = here
    return position


def _circle(position: list[int], waits_for: list[int], flow: Flow) -> list[int]:
    """The ranks of one circle of waiting, each waiting for the next; empty when all ranks are done.

    A rank that has finished keeps nobody waiting, so following a blocked rank's wait always leads to
    another blocked rank, and in the end round.
    """
    blocked = [rank for rank, end in enumerate(flow.first[1:]) if position[rank] < end]
    path: list[int] = []
    rank = blocked[0] if blocked else None
    while rank is not None and rank not in path:
        path.append(rank)
        rank = flow.owner[waits_for[position[rank]]]
    return path[path.index(rank) :] if rank is not None else []
