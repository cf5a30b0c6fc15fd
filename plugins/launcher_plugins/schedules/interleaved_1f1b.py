"""Interleaved 1F1B: each rank holds v model chunks and cycles through them, p microbatches at a time.

Two ranks, two chunks (a, b) and four microbatches, a row per rank, time to the right (a backward
takes two slots, a bar ends the warm-up and begins the cool-down):

    0  0a 1a 0b 1b|2a ·  0b━━━ 3a 1b━━━ 2b 0a━━━ 3b 1a━━━ · |2b━━━ ·  3b━━━ 2a━━━ 3a━━━
    1  ·  0a 1a|0b 0b━━━ 1b 1b━━━ 2a 0a━━━ 3a 1a━━━ 2b 2b━━━ 3b 3b━━━|2a━━━ 3a━━━ ·  ·

A microbatch visits every rank v times, each time 1/v of the rank's layers, so that the pipeline fills
v times faster: the idle time is that of 1F1B divided by v, at the cost of (p*v - 1) / (p - 1) times as
many messages.

A group may be larger than p: a microbatch that arrives early waits, and no rank idles longer. So any
number of microbatches from p on can be split into groups; with g the largest, rank r holds up to
(v-1)*g + 2(p-1-r) + 1 stage inputs, fewest with groups of p. `uneven_groups` allows it.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM (2021), section 2.2.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from launcher.contract.actions import B, F
from launcher.contract.strategy import Action, Fault, PipelineShape, Schedule
from launcher.typed.read import read_where


@dataclass(frozen=True, kw_only=True)
class InterleavedConfig:
    """Settings of the schedule."""

    uneven_groups: bool = field(
        default=False,
        metadata=read_where(
            "batch.num_microbatches is no multiple of parallel.pp",
            lambda num_microbatches, pp: num_microbatches % pp > 0,
            *("batch.num_microbatches", "parallel.pp"),
            neutral=False,
        ),
    )
    """Allow microbatches that are no multiple of p: groups are larger than p then, and hold more memory."""


class Interleaved1F1B(Schedule):
    """1F1B over v model chunks per rank, in groups of p microbatches, or of a few more."""

    Config = InterleavedConfig

    def __init__(self, config: InterleavedConfig | None = None) -> None:
        self._config = config or InterleavedConfig()

    def check(self, shape: PipelineShape) -> Iterable[Fault]:
        """At least two chunks and p microbatches, and a multiple of p unless groups may be uneven."""
        p, m = shape.num_pp_ranks, shape.num_microbatches
        path, plain = "batch.num_microbatches", {"parallel.schedule": "1f1b"}
        if shape.num_chunks < 2:
            rule = "interleaved_1f1b needs at least 2 model chunks on each pipeline rank"
            ways = ({"parallel.num_chunks": 2}, plain)
            yield Fault("parallel.num_chunks", shape.num_chunks, rule, ways=ways)
        if m < p:
            rule = f"{p} ranks need at least {p} microbatches; you have {m}"
            yield Fault(path, m, rule, ways=({path: p}, {"parallel.pp": m}, plain))
        elif m % p and not self._config.uneven_groups:
            groups = f"interleaved_1f1b runs microbatches in groups of pp={p}"
            rule = f"{groups}, so they must be a multiple of {p}"
            below, uneven = m // p * p, {"parallel.schedule_options.uneven_groups": True}
            yield Fault(path, m, rule, ways=({path: below}, {path: below + p}, uneven))

    def actions(self, shape: PipelineShape, pp_rank: int) -> Iterable[Action]:
        """Warm-up, steady pairs, cool-down, over all chunks of the rank."""
        p, v = shape.num_pp_ranks, shape.num_chunks
        forwards = _rounds(shape, pp_rank, F)
        backwards = _rounds(shape, pp_rank, B)
        num_warmup = min(len(forwards), 2 * (p - 1 - pp_rank) + (v - 1) * len(_groups(shape)[0]))
        yield from forwards[:num_warmup]
        for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
            yield forward
            yield backward
        yield from backwards[len(forwards) - num_warmup :]

    def bubble_fraction(self, shape: PipelineShape) -> float:
        """(p - 1) / (v*m + p - 1).

        >>> shape = PipelineShape(num_pp_ranks=4, num_chunks=2, num_microbatches=6)
        >>> Interleaved1F1B().bubble_fraction(shape)
        0.2
        """
        p, v, m = shape.num_pp_ranks, shape.num_chunks, shape.num_microbatches
        return (p - 1) / (v * m + p - 1)


def _groups(shape: PipelineShape) -> list[range]:
    """The groups of microbatches, of p or a few more each, the larger groups first.

    >>> _groups(PipelineShape(num_pp_ranks=4, num_microbatches=9))
    [range(0, 5), range(5, 9)]
    """
    num_groups = max(1, shape.num_microbatches // shape.num_pp_ranks)
    size, over = divmod(shape.num_microbatches, num_groups)
    starts = [group * size + min(group, over) for group in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _rounds(shape: PipelineShape, pp_rank: int, kind: str) -> list[Action]:
    """All forwards or all backwards of a rank: one group through each chunk in turn, then the next."""
    stages = shape.stages(pp_rank)
    return [
        action
        for group in _groups(shape)
        for stage in (stages if kind == F else reversed(stages))
        for action in Action.each(stage, kind, group)
    ]
