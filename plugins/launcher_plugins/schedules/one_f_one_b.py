"""1F1B: a few forwards to fill the pipeline, then one forward and one backward in turn.

Three ranks and four microbatches, a row per rank, time to the right (a backward takes two slots, a
bar ends the warm-up and begins the cool-down):

    0  0 1|2 · · · · 0━━ 3 1━━ ·|2━━ · 3━━
    1  · 0|1 · · 0━━ 2 1━━ 3 2━━ ·|3━━ · ·
    2  · · 0 0━━ 1 1━━ 2 2━━ 3 3━━ · · · ·

The later the stage, the sooner the gradient of a microbatch arrives: rank r runs p-1-r forwards ahead
and so holds at most p-r microbatches, whatever m is. The idle time is that of GPipe.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM (2021), section 2.2.1 (there: PipeDream-Flush).
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.contract.actions import B, F
from launcher.contract.strategy import Action, PipelineShape, Schedule


class OneFOneB(Schedule):
    """One forward, one backward, after a warm-up of p-1-r forwards."""

    def actions(self, shape: PipelineShape, pp_rank: int) -> Iterable[Action]:
        """Warm-up, steady pairs, cool-down."""
        m = shape.num_microbatches
        num_warmup = min(m, shape.num_pp_ranks - 1 - pp_rank)
        yield from Action.each(pp_rank, F, range(num_warmup))
        for microbatch in range(num_warmup, m):
            yield Action(pp_rank, F, microbatch)
            yield Action(pp_rank, B, microbatch - num_warmup)
        yield from Action.each(pp_rank, B, range(m - num_warmup, m))

    def bubble_fraction(self, shape: PipelineShape) -> float:
        """(p - 1) / (m + p - 1).

        >>> OneFOneB().bubble_fraction(PipelineShape(num_pp_ranks=4, num_microbatches=12))
        0.2
        """
        p, m = shape.num_pp_ranks, shape.num_microbatches
        return (p - 1) / (m + p - 1)
