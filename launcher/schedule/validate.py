"""Whether action lists can run: complete, in order, every message matched, no deadlock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise, product
from operator import itemgetter

from launcher.errors import Fault, PlanError
from launcher.schedule.actions import COMPUTE, RB, RF, SB, SF, Action, B, F, PipelineShape
from launcher.schedule.deadlock import find_deadlock
from launcher.schedule.finding import Finding, ScheduleError
from launcher.schedule.flow import ABSENT, Flow, Lists, crosses

ORDERED = ((F, B), (RF, F), (F, SF), (RB, B), (B, SB))
"""(earlier, later): kinds of one stage and microbatch that stand in this order on their rank."""

MAX_NAMED = 6
"""Actions named in one fault."""


def validate(lists: Lists, shape: PipelineShape) -> None:
    """Checks complete action lists.

    Every microbatch runs F and B once per stage; every action stands after what it needs on its
    rank; every message has one send and one receive, and the receives from one rank are posted in
    the order of its sends; no rank waits for ever even when each send blocks until the matching
    receive is posted.

    Raises:
        PlanError: with all faults of the first of these checks that finds any, and the lists around
            them with the wrong actions marked.
    """
    _require(lists, _inventory(lists, shape, with_messages=True))
    flow = Flow.of(lists, shape)
    _require(lists, chain(_order(lists, flow), _message_order(lists, flow)))
    _require(lists, find_deadlock(lists, flow))


def validate_compute(compute: Lists, shape: PipelineShape) -> Flow:
    """Checks the forwards and backwards that a schedule gives, and returns what passes between them.

    Raises:
        PlanError: when one is missing, repeated, on the wrong rank, or before what it needs.
    """
    _require(compute, _inventory(compute, shape, with_messages=False))
    flow = Flow.of(compute, shape)
    _require(compute, _order(compute, flow))
    return flow


def _require(lists: Lists, findings: Iterator[Finding]) -> None:
    if found := list(findings):
        raise ScheduleError(lists, found)


def _inventory(lists: Lists, shape: PipelineShape, *, with_messages: bool) -> Iterator[Finding]:
    """Actions that are missing, repeated, or have no place on their rank."""
    if len(lists) != shape.num_pp_ranks:
        fault = Fault("pipeline lists", len(lists), f"one list for each of {shape.num_pp_ranks} pp_ranks", "")
        raise PlanError([fault])
    for pp_rank, actions in enumerate(lists):
        wanted = _wanted(shape, pp_rank, with_messages=with_messages)
        present = set(actions)
        num_wanted = sum(len(kinds) for _, kinds in wanted) * shape.num_microbatches
        if len(actions) == num_wanted and present.issuperset(_every(wanted, shape)):
            continue
        belonging = _belonging(shape, pp_rank, with_messages)
        complete = set(_every(wanted, shape))
        yield from _misplaced(actions, pp_rank, present - complete, belonging)
        yield from _missing(actions, pp_rank, complete - present)
        yield from _repeated(actions, pp_rank)


def _wanted(shape: PipelineShape, pp_rank: int, *, with_messages: bool) -> list[tuple[int, tuple[str, ...]]]:
    """The kinds of action that each stage of a rank runs for every microbatch."""
    wanted = []
    for stage in shape.stages(pp_rank):
        after = (SF, RB) if with_messages and crosses(shape, stage) else ()
        before = (RF, SB) if with_messages and stage and crosses(shape, stage - 1) else ()
        wanted.append((stage, (*COMPUTE, *after, *before)))
    return wanted


def _every(wanted: list[tuple[int, tuple[str, ...]]], shape: PipelineShape) -> Iterator[tuple[int, str, int]]:
    microbatches = range(shape.num_microbatches)
    return chain.from_iterable(product((stage,), kinds, microbatches) for stage, kinds in wanted)


def _belonging(shape: PipelineShape, pp_rank: int, with_messages: bool) -> str:
    """What belongs on a rank, in words."""
    stages = ", ".join(map(str, shape.stages(pp_rank)))
    kinds = "" if with_messages else "; F and B only, sends and receives are added by the launcher"
    return f"stage {stages}; microbatch 0 to {shape.num_microbatches - 1}{kinds}"


def _misplaced(
    actions: Sequence[Action], pp_rank: int, wrong: set[Action], belonging: str
) -> Iterator[Finding]:
    places = [index for index, action in enumerate(actions) if action in wrong]
    if places:
        yield Finding(
            pp_rank=pp_rank,
            index=places[0],
            given=_some(actions[index] for index in places),
            rule=f"not among the actions of pp_rank {pp_rank} ({belonging})",
            fix="Remove it.",
        )


def _missing(actions: Sequence[Action], pp_rank: int, absent: set[tuple[int, str, int]]) -> Iterator[Finding]:
    if absent:
        missing = [Action(*action) for action in sorted(absent)]
        stage, _, microbatch = missing[0]
        related = (i for i, action in enumerate(actions) if (action[0], action[2]) == (stage, microbatch))
        index = next(related, len(actions))
        yield Finding(
            pp_rank=pp_rank,
            index=index,
            given=str(actions[index]) if index < len(actions) else "end",
            rule=f"{_some(missing)} missing; each stage runs every microbatch once forward and once "
            "backward, and each message is sent and received once",
            fix="Add what is missing.",
        )


def _repeated(actions: Sequence[Action], pp_rank: int) -> Iterator[Finding]:
    seen: set[Action] = set()
    for index, action in enumerate(actions):
        if action in seen:
            yield Finding(
                pp_rank=pp_rank,
                index=index,
                given=str(action),
                rule=f"repeated; it already stands at action {actions.index(action)}",
                fix="Remove one of them.",
            )
            return
        seen.add(action)


def _order(lists: Lists, flow: Flow) -> Iterator[Finding]:
    """The first action of each rank that stands before what it needs on the same rank."""
    pairs = [
        (needed, early)
        for earlier, later in ORDERED
        for needed, early in zip(flow.place[earlier], flow.place[later], strict=True)
        if needed > early != ABSENT
    ]
    pairs += [
        (source, target)
        for target, source in enumerate(flow.producer)
        if source > target and flow.owner[source] == flow.owner[target]
    ]
    reported: set[int] = set()
    for needed, early in sorted(pairs, key=itemgetter(1)):
        pp_rank = flow.owner[early]
        if pp_rank not in reported:
            reported.add(pp_rank)
            actions, first = lists[pp_rank], flow.first[pp_rank]
            yield Finding(
                pp_rank=pp_rank,
                index=early - first,
                given=str(actions[early - first]),
                rule=f"needs {actions[needed - first]}, which stands later, at action {needed - first}",
                fix=f"Put {actions[needed - first]} before it.",
            )


def _message_order(lists: Lists, flow: Flow) -> Iterator[Finding]:
    """The first receive from each rank that is posted before one whose message is sent earlier."""
    for (sender, pp_rank), receive_of in flow.channels().items():
        receives = [receive_of[send] for send in sorted(receive_of)]
        for earlier, receive in pairwise(receives):
            if receive < earlier:
                actions, first = lists[pp_rank], flow.first[pp_rank]
                wrong, other = actions[receive - first], actions[earlier - first]
                yield Finding(
                    pp_rank=pp_rank,
                    index=receive - first,
                    given=str(wrong),
                    rule=f"stands before {other}, whose message pp_rank {sender} sends first; receives from "
                    "one rank are posted in the order of its sends",
                    fix=f"Put {other} before {wrong}.",
                )
                break


def _some(actions: Iterable[Action]) -> str:
    """The first few actions as text, with the number of the others."""
    texts = [str(action) for action in actions]
    others = f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return " ".join(texts[:MAX_NAMED]) + others
