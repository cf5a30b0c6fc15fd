"""Naive model parallelism: one microbatch at a time, forward to the end and back again.

Three ranks and two microbatches, a row per rank, time to the right (a backward takes two slots):

    0  0 · · · · · · 0━━ 1 · · · · · · 1━━
    1  · 0 · · · 0━━ · · · 1 · · · 1━━ · ·
    2  · · 0 0━━ · · · · · · 1 1━━ · · · ·

One rank works while all others wait: splitting the model saves memory and makes nothing faster. This is
the baseline of pipelining. Of p ranks p-1 are idle at any time, whatever m is, and each holds one
microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.contract.actions import B, F
from launcher.contract.strategy import Action, PipelineShape, Schedule


class Naive(Schedule):
    """Each microbatch forward and backward before the next one starts."""

    def actions(self, shape: PipelineShape, pp_rank: int) -> Iterable[Action]:
        """Forward and backward of every microbatch in turn."""
        for microbatch in range(shape.num_microbatches):
            yield Action(pp_rank, F, microbatch)
            yield Action(pp_rank, B, microbatch)

    def bubble_fraction(self, shape: PipelineShape) -> float:
        """(p - 1) / p.

        >>> Naive().bubble_fraction(PipelineShape(num_pp_ranks=4, num_microbatches=9))
        0.75
        """
        return (shape.num_pp_ranks - 1) / shape.num_pp_ranks
