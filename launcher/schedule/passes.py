"""From a schedule's compute actions to the action lists that the ranks execute.

Where the messages go:

- A send stands right after the action that produces what is sent.
- A receive is posted `depth` compute actions ahead of its consumer. At depth 0 it stands right
  before it; a rank that runs 1F1B would then block in the send of a forward while its neighbour
  blocks in the send of a backward, each waiting for the other to post a receive. `smallest_depth`
  finds how much earlier is early enough (1F1B: 1, interleaved: 2); `OVERLAP_DEPTH` hides transfers.
- The receives from one rank are posted in the order in which that rank sends, even where they are
  needed in another order. So a backend may match messages by order (NCCL knows no tags) as well as
  by tag. Where both directions share one queue, as on one NCCL communicator, two ranks that both
  post early would block each other: give each direction its own.

Buffers: a message's buffer belongs to one (stage, kind, microbatch) from the posting of its receive
until the backward that uses it last, so no two pending receives share one. Posting early costs the
buffers of the receives pending at once, at most depth + 1 unless the order above asks for more.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from launcher.base.errors import PlanError
from launcher.contract.actions import RB, RF, SB, SF, Action, F, PipelineShape
from launcher.contract.strategy import Schedule, splits_backward
from launcher.schedule.dependencies import ABSENT, Flow, Lists
from launcher.schedule.receive_depth import deadlines, smallest_depth
from launcher.schedule.simulate import paused_collector
from launcher.schedule.validation.plugin_output import given_actions, given_faults
from launcher.schedule.validation.validate import validate, validate_compute

OVERLAP_DEPTH = 2
"""Least depth used, so that transfers overlap with compute.

At depth 0 a transfer starts when its consumer is due. At depth d it has the d actions before it to
run in: by simulation with backwards twice as long as forwards, depth 1 makes the step as short as
any depth can while a transfer takes up to one forward, and depth 2 up to one and a half.
"""


@paused_collector()
def lower(schedule: Schedule, shape: PipelineShape) -> tuple[tuple[Action, ...], ...]:
    """The complete and validated actions of every pp_rank.

    Raises:
        PlanError: when the schedule refuses the shape, or its lists cannot run.
        PluginError: when it gives something else than faults and actions.
    """
    if faults := given_faults(schedule, shape):
        raise PlanError(faults)
    compute = given_actions(schedule, shape)
    is_split = splits_backward(schedule)
    flow = validate_compute(compute, shape, splits_backward=is_split)
    deadline = deadlines(flow)
    depth = max(OVERLAP_DEPTH, smallest_depth(flow, deadline))
    lists = _with_messages(compute, flow, deadline, depth)
    validate(lists, shape, splits_backward=is_split)
    return lists


def add_communication(compute: Lists, shape: PipelineShape, depth: int) -> tuple[tuple[Action, ...], ...]:
    """Adds a send after every producer, and posts every receive ``depth`` compute actions ahead.

    >>> from launcher.contract.actions import from_text, to_text
    >>> shape = PipelineShape(num_pp_ranks=2, num_microbatches=1)
    >>> lists = [from_text("0F0 0B0"), from_text("1F0 1B0")]
    >>> [to_text(actions) for actions in add_communication(lists, shape, depth=0)]
    ['0F0 0SF0 0RB0 0B0', '1RF0 1F0 1B0 1SB0']
    """
    flow = Flow.of(compute, shape)
    return _with_messages(compute, flow, deadlines(flow), depth)


def _with_messages(
    compute: Lists, flow: Flow, deadline: list[int], depth: int
) -> tuple[tuple[Action, ...], ...]:
    incoming: list[list[int]] = [[] for _ in compute]
    for sender, needed in enumerate(deadline):
        if needed != ABSENT:
            incoming[flow.owner[needed]].append(sender)
    producers = list(chain.from_iterable(compute))
    lists = []
    for start, actions, senders in zip(flow.first, compute, incoming, strict=False):
        senders.sort(key=deadline.__getitem__)  # equal deadlines keep the order of the sends
        receives = _receives(map(producers.__getitem__, senders))
        due = [deadline[sender] - depth for sender in senders]
        due.append(start + len(actions))  # never: there is always a next one to compare with
        next_due = 0
        complete: list[Action] = []
        for place, action in enumerate(actions, start):
            while due[next_due] <= place:
                complete.append(receives[next_due])
                next_due += 1
            complete.append(action)
            if deadline[place] != ABSENT:
                complete.append(_send(*action))
        lists.append(tuple(complete))
    return tuple(lists)


def _send(stage: int, kind: str, microbatch: int) -> Action:
    """The send of what a compute action produces."""
    return _new(Action, (stage, SF if kind == F else SB, microbatch))


def _receives(producers: Iterable[Action]) -> list[Action]:
    """The receives of what compute actions produce, on the rank that needs it."""
    return [
        _new(Action, (stage + 1, RF, microbatch) if kind == F else (stage - 1, RB, microbatch))
        for stage, kind, microbatch in producers
    ]


_new = tuple.__new__  # half the time of calling Action, on the path of every message
