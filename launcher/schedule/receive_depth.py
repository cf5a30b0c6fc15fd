"""How early receives must be posted so that blocking sends cannot deadlock."""

from __future__ import annotations

from itertools import pairwise

from launcher.schedule.dependencies import ABSENT, Flow


def deadlines(flow: Flow) -> list[int]:
    """For each action that sends, the action before which the receive must be posted, or `ABSENT`.

    That is the consumer, or an earlier action of its rank that needs a message which the same rank
    sends later: posted by these deadlines, receives stand in the order of their sends.
    """
    owner, deadline = flow.owner, [ABSENT] * len(flow.owner)
    for rank, (first, end) in enumerate(pairwise(flow.first)):
        soonest: dict[int, int] = {}
        for sender in range(end - 1, first - 1, -1):
            consumer = flow.consumer[sender]
            if consumer != ABSENT and owner[consumer] != rank:
                receiver = owner[consumer]
                soonest[receiver] = deadline[sender] = min(consumer, soonest.get(receiver, consumer))
    return deadline


def smallest_depth(flow: Flow, deadline: list[int]) -> int:
    """The least depth at which the lists run to the end with sends that block until received.

    Runs them without a clock: each rank goes on until it waits for a message or blocks in a send.
    When all ranks stand still, receives are posted one action earlier and the run goes on from where
    it stands (posting earlier takes nothing back). Lists whose data flow is itself cyclic stand still
    at every depth; the depth returned is then beyond the longest list, and `validate` names the cycle.

    >>> from launcher.contract.actions import PipelineShape, from_text
    >>> one_f_one_b = [from_text("0F0 0F1 0B0 0F2 0B1 0B2"), from_text("1F0 1B0 1F1 1B1 1F2 1B2")]
    >>> flow = Flow.of(one_f_one_b, PipelineShape(num_pp_ranks=2, num_microbatches=3))
    >>> smallest_depth(flow, deadlines(flow))
    1
    """
    position, stop = flow.first[:-1], flow.first[1:]
    is_computed = bytearray(len(flow.owner))
    longest = max(end - first for first, end in zip(position, stop, strict=True))
    depth = 0
    while position != stop and depth <= longest:
        if not _advance(flow, deadline, depth, position, is_computed):
            depth += 1
    return depth


def _advance(
    flow: Flow, deadline: list[int], depth: int, position: list[int], is_computed: bytearray
) -> bool:
    """Lets every rank go on as far as it can; whether any did.

    A rank at an action has finished the sends of those before it and posted every receive that is
    due within ``depth`` actions. It may be computed already, and blocked in its send.
    """
    owner, producer = flow.owner, flow.producer
    has_moved = False
    for rank, end in enumerate(flow.first[1:]):
        here = position[rank]
        while here < end:
            if not is_computed[here]:
                source = producer[here]
                if source != ABSENT and not is_computed[source]:
                    break
                is_computed[here] = has_moved = True
            needed = deadline[here]
            if needed != ABSENT and position[owner[needed]] < needed - depth:
                break
            here += 1
            has_moved = True
        position[rank] = here
    return has_moved
