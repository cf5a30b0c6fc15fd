"""ZB-H1: 1F1B with the backward split in two, its weight gradients deferred to fill idle time.

Three ranks and four microbatches, a row per rank, time to the right (0 forward, 0━ gradient of the
stage's input, 0w weight gradients, a slot each; a bar ends the warm-up and begins the cool-down):

    0  0  1 |2  ·  ·  0━ 0w 3  1━ 1w|2━ 2w 3━ 3w
    1  ·  0 |1  ·  0━ 2  1━ 0w 3  2━ 1w|3━ 2w 3w
    2  ·  ·  0  0━ 1  1━ 2  2━ 0w 3  3━ 1w|2w 3w

The previous stage waits only for the gradient of the input. So that is computed first, and rank r runs
the weight gradients r microbatches later: the later the stage, the sooner 1F1B would have released a
microbatch, and the more of them a rank can defer without holding more than rank 0.

With F, B (input gradient) and W the times of the three, and m >= p, each rank idles
(p-1)(F + B - min(F, B, W)): (p-1)(F + B - W) as long as W is the shortest. 1F1B idles
(p-1)(F + B + W). Every rank holds min(m, p) microbatches, which is 1F1B's worst rank.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2 (there: ZB-H1).
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.contract.actions import B, F, W
from launcher.contract.strategy import Action, PipelineShape, Schedule


class ZBH1(Schedule):
    """1F1B whose rank r runs the weight gradients r microbatches after the input gradients."""

    splits_backward = True

    def actions(self, shape: PipelineShape, pp_rank: int) -> Iterable[Action]:
        """Warm-up as 1F1B, then F B W with the forwards ahead and the W deferred, while there are any."""
        m = shape.num_microbatches
        num_warmup, num_deferred = min(m, shape.num_pp_ranks - 1 - pp_rank), min(m, pp_rank)
        yield from Action.each(pp_rank, F, range(num_warmup))
        for microbatch in range(m):
            if microbatch + num_warmup < m:
                yield Action(pp_rank, F, microbatch + num_warmup)
            yield Action(pp_rank, B, microbatch)
            if microbatch >= num_deferred:
                yield Action(pp_rank, W, microbatch - num_deferred)
        yield from Action.each(pp_rank, W, range(m - num_deferred, m))

    def bubble_fraction(self, shape: PipelineShape) -> float:
        """idle / (3m + idle), where each rank idles 2(p - 1) - (min(m, p) - 1) slots: p - 1 for m >= p.

        >>> ZBH1().bubble_fraction(PipelineShape(num_pp_ranks=4, num_microbatches=9))
        0.1
        """
        p, m = shape.num_pp_ranks, shape.num_microbatches
        idle = 2 * (p - 1) - (min(m, p) - 1)
        return idle / (3 * m + idle)
