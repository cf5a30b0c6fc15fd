"""Where every action stands and which one feeds which, as flat integer lists.

The analyses of a schedule look at hundreds of thousands of actions. They number the actions of all
ranks in one sequence, rank after rank, and work on lists indexed by that number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat

from launcher.contract.actions import COMPUTE, RB, RF, SB, SF, Action, B, F, PipelineShape

ABSENT = -1
"""Stands for the number of an action that is not there."""

Lists = Sequence[Sequence[Action]]
"""The actions of every pp_rank, in order."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The numbered actions of all ranks, and what passes between them."""

    first: list[int]
    """Number of each rank's first action, and after the last rank the number of all actions."""
    owner: list[int]
    """The rank of each action."""
    place: dict[str, list[int]]
    """``place[kind][stage * num_microbatches + microbatch]`` is an action's number, or `ABSENT`."""
    producer: list[int]
    """For each forward and backward, the one of the neighbouring stage whose result it needs."""
    consumer: list[int]
    """For each forward and backward, the one of the neighbouring stage that needs its result."""
    num_microbatches: int

    @staticmethod
    def of(lists: Lists, shape: PipelineShape) -> Flow:
        """Numbers the actions of all ranks, rank after rank, and links them.

        A forward feeds the same microbatch's forward of the stage after it, a backward feeds that of
        the stage before it: in a table ordered by stages, m places further on or back.

        >>> shape = PipelineShape(num_pp_ranks=2, num_microbatches=1)
        >>> flow = Flow.of([[Action(0, F, 0), Action(0, B, 0)], [Action(1, F, 0), Action(1, B, 0)]], shape)
        >>> flow.place[F], flow.place[B], flow.consumer
        ([0, 2], [1, 3], [2, -1, -1, 1])
        """
        m = shape.num_microbatches
        lengths = [len(actions) for actions in lists]
        first = list(accumulate(lengths, initial=0))
        place = {kind: [ABSENT] * (shape.num_stages * m) for kind in (*COMPUTE, RF, SF, RB, SB)}
        for start, actions in zip(first, lists, strict=False):
            for number, (stage, kind, microbatch) in enumerate(actions, start):
                place[kind][stage * m + microbatch] = number
        producer, consumer = [ABSENT] * first[-1], [ABSENT] * first[-1]
        for sources, targets in ((place[F], place[F][m:]), (place[B][m:], place[B])):
            for source, target in zip(sources, targets, strict=False):
                producer[target], consumer[source] = source, target
        return Flow(
            first=first,
            owner=list(chain.from_iterable(map(repeat, range(len(lengths)), lengths))),
            place=place,
            producer=producer,
            consumer=consumer,
            num_microbatches=m,
        )

    def channels(self) -> dict[tuple[int, int], dict[int, int]]:
        """The receive of each send, by (sending rank, receiving rank)."""
        channels: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        m, place = self.num_microbatches, self.place
        for sends, receives in ((place[SF], place[RF][m:]), (place[SB][m:], place[RB])):
            for row in range(0, len(place[SF]) - m, m):
                if sends[row] != ABSENT:
                    ranks = self.owner[sends[row]], self.owner[receives[row]]
                    channels[ranks].update(zip(sends[row : row + m], receives[row : row + m], strict=True))
        return channels

    def messages(self) -> Iterator[tuple[int, int, int]]:
        """(send, receive, consumer) of every message; send and receive are `ABSENT` inside one rank."""
        m, place = self.num_microbatches, self.place
        yield from zip(place[SF], place[RF][m:], place[F][m:], strict=False)
        yield from zip(place[SB][m:], place[RB], place[B], strict=False)


def compute_only(lists: Lists) -> list[list[Action]]:
    """The compute actions of every rank, without sends and receives."""
    kinds = frozenset(COMPUTE)
    return [[action for action in actions if action[1] in kinds] for actions in lists]


def crosses(shape: PipelineShape, stage: int) -> bool:
    """Whether the result of a stage goes to a stage on another rank (the last stage's goes nowhere).

    >>> crosses(PipelineShape(num_pp_ranks=2), 0), crosses(PipelineShape(num_pp_ranks=1, num_chunks=2), 0)
    (True, False)
    """
    return stage + 1 < shape.num_stages and shape.pp_rank(stage) != shape.pp_rank(stage + 1)
