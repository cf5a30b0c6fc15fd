"""GPipe: all forwards, then all backwards.

Three ranks and four microbatches, a row per rank, time to the right (a backward takes two slots):

    0  0 1 2|3 · · · · · · 0━━|1━━ 2━━ 3━━
    1  · 0 1 2|3 · · · 0━━|1━━ 2━━ 3━━ · ·
    2  · · 0 1 2|3 0━━|1━━ 2━━ 3━━ · · · ·

Simple, but every rank holds all m microbatches at its peak. The idle time is that of 1F1B.

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism (2019), section 2.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.contract.actions import B, F
from launcher.contract.strategy import Action, PipelineShape, Schedule


class GPipe(Schedule):
    """All forwards, then all backwards, in the order of the microbatches."""

    def actions(self, shape: PipelineShape, pp_rank: int) -> Iterable[Action]:
        """The rank's forwards, then its backwards."""
        yield from Action.each(pp_rank, F, range(shape.num_microbatches))
        yield from Action.each(pp_rank, B, range(shape.num_microbatches))

    def bubble_fraction(self, shape: PipelineShape) -> float:
        """(p - 1) / (m + p - 1).

        >>> GPipe().bubble_fraction(PipelineShape(num_pp_ranks=2, num_microbatches=3))
        0.25
        """
        p, m = shape.num_pp_ranks, shape.num_microbatches
        return (p - 1) / (m + p - 1)
