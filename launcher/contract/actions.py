"""The vocabulary of a pipeline schedule: what one rank does, in which order.

A schedule is, for each pipeline rank, a list of actions. `2F0` reads: stage 2, Forward,
microbatch 0. Schedule plugins write only the compute actions; `passes.py` adds the rest.

    kind  text   meaning
    F     2F0    forward of microbatch 0 through stage 2
    B     2B0    backward of microbatch 0 through stage 2: input and weight gradients, or the
                 gradient of the stage's input alone where the schedule splits the backward
    W     2W0    weight gradients of microbatch 0 on stage 2, only where the schedule splits
    RF    2RF0   post the receive of stage 2's input, sent by stage 1
    SF    2SF0   start sending stage 2's output to stage 3
    RB    2RB0   post the receive of the gradient of stage 2's output, sent by stage 3
    SB    2SB0   start sending the gradient of stage 2's input to stage 1

A receive is posted at its position in the list; the F or B that needs the message waits for it.
The activations of a microbatch on a stage are held from its F to its B, or to its W where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

F, B, W, RF, SF, RB, SB = "F", "B", "W", "RF", "SF", "RB", "SB"
COMPUTE = (F, B, W)
SENDS_IN_FLIGHT = 4
"""Largest number of pending sends of a rank; before it starts one more, it waits for the oldest.

The receiver posts early and has received the oldest long before, so the wait costs nothing. It cannot
deadlock, since a list is valid only if it would run with sends that block.
"""
_TEXT = re.compile(r"(\d+)([A-Z]+)(\d+)")


class Action(NamedTuple):
    """One step of a rank.

    >>> str(Action(2, F, 0)), Action.parse("3SB11")
    ('2F0', Action(stage=3, kind='SB', microbatch=11))
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def each(cls, stage: int, kind: str, microbatches: Iterable[int]) -> Iterator[Action]:
        """The same action for several microbatches; several times faster than one call each.

        >>> to_text(Action.each(2, F, range(3)))
        '2F0 2F1 2F2'
        """
        return map(partial(tuple.__new__, cls), zip(repeat(stage), repeat(kind), microbatches, strict=False))

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action written as ``text``.

        Raises:
            ValueError: when it is not stage, kind and microbatch.
        """
        match = _TEXT.fullmatch(text)
        if not match or match[2] not in (*COMPUTE, RF, SF, RB, SB):
            raise ValueError(f"{text!r} is not an action such as 2F0 (stage 2, forward, microbatch 0)")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """The sizes that a schedule depends on. ``stage = chunk * num_pp_ranks + pp_rank``."""

    num_pp_ranks: int
    """Pipeline ranks (p)."""
    num_chunks: int = 1
    """Model chunks per rank (v)."""
    num_microbatches: int = 1
    """Microbatches per step and replica (m)."""
    num_frozen: int = 0
    """Stages, from the first on, in which nothing is trained: no gradient is sent to them."""

    @property
    def num_stages(self) -> int:
        """Stages over all ranks (p * v)."""
        return self.num_pp_ranks * self.num_chunks

    def pp_rank(self, stage: int) -> int:
        """The rank that holds a stage."""
        return stage % self.num_pp_ranks

    def chunk(self, stage: int) -> int:
        """Which of its rank's chunks a stage is."""
        return stage // self.num_pp_ranks

    def stages(self, pp_rank: int) -> range:
        """A rank's stages, in chunk order."""
        return range(pp_rank, self.num_stages, self.num_pp_ranks)


def compute_kinds(*, splits_backward: bool) -> tuple[str, ...]:
    """The kinds of compute action that every stage runs once per microbatch."""
    return (F, B, W) if splits_backward else (F, B)


def has_weight_actions(lists: Sequence[Iterable[Action]]) -> bool:
    """Whether complete lists split the backward; then every rank's list has a W."""
    return any(kind == W for _, kind, _ in lists[0])


def to_text(actions: Iterable[Action]) -> str:
    """Actions as one line of text, the form kept in plan.json.

    >>> to_text([Action(0, F, 0), Action(0, B, 0)])
    '0F0 0B0'
    """
    return " ".join([f"{stage}{kind}{microbatch}" for stage, kind, microbatch in actions])


def from_text(text: str) -> tuple[Action, ...]:
    """The inverse of `to_text`."""
    return tuple(Action.parse(word) for word in text.split())
