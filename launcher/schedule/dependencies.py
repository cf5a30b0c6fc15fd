"""The dependency graph of a schedule's actions, as flat integer lists.

The analyses of a schedule visit hundreds of thousands of actions. They number the actions of all
ranks in one sequence, rank after rank, and work on lists indexed by that number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat

from launcher.contract.actions import COMPUTE, RB, RF, SB, SF, Action, B, F, PipelineShape

ABSENT = -1
"""Number of an action that does not exist."""

ActionLists = Sequence[Sequence[Action]]
"""The actions of every pp_rank, in order."""


@dataclass(frozen=True, kw_only=True)
class DependencyGraph:
    """The numbered actions of all ranks, and the data dependencies between them."""

    first: list[int]
    """Number of each rank's first action, and after the last rank the number of all actions."""
    owner: list[int]
    """The rank of each action."""
    index: dict[str, list[int]]
    """``index[kind][stage * num_microbatches + microbatch]`` is an action's number, or `ABSENT`."""
    producer: list[int]
    """For each forward and backward, the action of the neighbouring stage whose result it needs."""
    consumer: list[int]
    """For each forward and backward, the action of the neighbouring stage that needs its result."""
    num_microbatches: int

    @staticmethod
    def of(lists: ActionLists, shape: PipelineShape) -> DependencyGraph:
        """Numbers the actions of all ranks, rank after rank, and links them.

        A forward feeds the same microbatch's forward of the stage after it, a backward feeds that of
        the stage before it: in a table ordered by stage, m entries later or earlier.

        >>> shape = PipelineShape(num_pp_ranks=2, num_microbatches=1)
        >>> lists = [[Action(0, F, 0), Action(0, B, 0)], [Action(1, F, 0), Action(1, B, 0)]]
        >>> graph = DependencyGraph.of(lists, shape)
        >>> graph.index[F], graph.index[B], graph.consumer
        ([0, 2], [1, 3], [2, -1, -1, 1])
        """
        m = shape.num_microbatches
        lengths = [len(actions) for actions in lists]
        first = list(accumulate(lengths, initial=0))
        index = {kind: [ABSENT] * (shape.num_stages * m) for kind in (*COMPUTE, RF, SF, RB, SB)}
        for start, actions in zip(first, lists, strict=False):
            for number, (stage, kind, microbatch) in enumerate(actions, start):
                index[kind][stage * m + microbatch] = number
        producer, consumer = [ABSENT] * first[-1], [ABSENT] * first[-1]
        first_b = shape.num_frozen * m  # no gradient is sent to the stages before
        for sources, targets in ((index[F], index[F][m:]), (index[B][first_b + m :], index[B][first_b:])):
            for source, target in zip(sources, targets, strict=False):
                producer[target], consumer[source] = source, target
        return DependencyGraph(
            first=first,
            owner=list(chain.from_iterable(map(repeat, range(len(lengths)), lengths))),
            index=index,
            producer=producer,
            consumer=consumer,
            num_microbatches=m,
        )

    def channels(self) -> dict[tuple[int, int], dict[int, int]]:
        """The receive of each send, by (sending rank, receiving rank)."""
        channels: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        m, index = self.num_microbatches, self.index
        for sends, receives in ((index[SF], index[RF][m:]), (index[SB][m:], index[RB])):
            for row in range(0, len(index[SF]) - m, m):
                if sends[row] != ABSENT:
                    ranks = self.owner[sends[row]], self.owner[receives[row]]
                    channels[ranks].update(zip(sends[row : row + m], receives[row : row + m], strict=True))
        return channels

    def messages(self) -> Iterator[tuple[int, int, int]]:
        """(send, receive, consumer) of every message; send and receive are `ABSENT` inside one rank."""
        m, index = self.num_microbatches, self.index
        yield from zip(index[SF], index[RF][m:], index[F][m:], strict=False)
        yield from zip(index[SB][m:], index[RB], index[B], strict=False)
