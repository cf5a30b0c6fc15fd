"""Finds ranks that would wait for each other for ever, and says under which kind of sends.

- Buffered: a send returns at once, so only a forward or backward waits, for its message. What
  deadlocks here is wrong in the order of compute, and deadlocks however sends behave.
- Blocking: a send returns when its receive has been posted. What deadlocks only here is mended by
  posting receives earlier.
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.contract.actions import COMPUTE
from launcher.schedule.dependencies import ABSENT, Flow, Lists
from launcher.schedule.validation.violation import Finding

_ALWAYS, _BLOCKING = "deadlock however sends behave", "deadlock when sends block until received"


def find_deadlock(lists: Lists, flow: Flow) -> Iterator[Finding]:
    """The ranks of a circle of waiting, if there is one under either kind of sends.

    ``lists`` must be complete and in order on every rank. A list free of deadlock under blocking
    sends is free of it under buffered ones, so these are tried only where those fail.
    """
    blocking = _waits(flow, sends_block=True)
    blocked_at = _run(flow, blocking)
    if blocked_at == flow.first[1:]:
        return
    buffered = _waits(flow, sends_block=False)
    buffered_at = _run(flow, buffered)
    if buffered_at != flow.first[1:]:
        yield from _findings(lists, flow, buffered, buffered_at, _ALWAYS)
    else:
        yield from _findings(lists, flow, blocking, blocked_at, _BLOCKING)


def _findings(
    lists: Lists, flow: Flow, waits_for: list[int], position: list[int], kind: str
) -> Iterator[Finding]:
    """Who waits for whom, rank by rank round the circle."""
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
            rule=f"{kind}: waits for pp_rank {other} to {verb} {awaited}, "
            f"which stands behind {blocked} there",
            fix=f"Let pp_rank {other} {verb} {awaited} before {blocked}.",
        )


def _waits(flow: Flow, *, sends_block: bool) -> list[int]:
    """For each action, the one on another rank that must have been reached first, or `ABSENT`.

    A forward or backward waits for its message to be sent; a send that blocks, for its receive.
    """
    waits_for = [ABSENT] * len(flow.owner)
    for send, receive, consumer in flow.messages():
        if send != ABSENT:
            waits_for[consumer] = send
            if sends_block:
                waits_for[send] = receive
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
    """The ranks of one circle of waiting, each waiting for the next.

    A rank that has finished keeps nobody waiting, so following a blocked rank's wait always leads to
    another blocked rank, and in the end round.
    """
    rank = next(rank for rank, end in enumerate(flow.first[1:]) if position[rank] < end)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = flow.owner[waits_for[position[rank]]]
    return path[path.index(rank) :]
