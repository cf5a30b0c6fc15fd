"""Eager 1F1B: twice 1F1B's warm-up, so that messages have time to arrive.

Three ranks and six microbatches, a row per rank, time to the right (a backward takes two slots, a
bar ends the warm-up and begins the cool-down):

    0  0 1 2 3|4 · · 0━━ 5 1━━ ·|2━━ · 3━━ · 4━━ · 5━━
    1  · 0 1|2 · 0━━ 3 1━━ 4 2━━ 5 3━━ ·|4━━ · 5━━ · ·
    2  · · 0 0━━ 1 1━━ 2 2━━ 3 3━━ 4 4━━ 5 5━━ · · · ·

Under 1F1B a rank runs as far ahead as the pipeline is long, and so waits whenever a message takes
any time. Here it runs twice as far ahead and waits for none that takes up to half a forward and
backward; the price is up to 2(p-r)-1 microbatches held instead of p-r. With free messages it idles
as 1F1B does.

Source: Zhuang et al., On Optimizing the Communication of Model Parallelism (2023), section 4.
"""

from collections.abc import Iterable

from launcher.contract.strategy import Action, Fault, PipelineShape


class Eager1F1B:
    """One forward, one backward, after a warm-up of 2(p-1-r) forwards."""

    splits_backward = False

    def check(self, shape: PipelineShape) -> Iterable[Fault]:
        """Refuses more than one model chunk per rank."""
        if shape.num_chunks > 1:
            rule = "eager_1f1b runs one model chunk per pipeline rank"
            yield Fault("parallel.num_chunks", shape.num_chunks, rule, ways=({"parallel.num_chunks": 1},))

    def actions(self, shape: PipelineShape, pp_rank: int) -> Iterable[Action]:
        """Warm-up, steady pairs, cool-down."""
        m = shape.num_microbatches
        num_warmup = min(m, 2 * (shape.num_pp_ranks - 1 - pp_rank))
        yield from Action.each(pp_rank, "F", range(num_warmup))
        for microbatch in range(num_warmup, m):
            yield Action(pp_rank, "F", microbatch)
            yield Action(pp_rank, "B", microbatch - num_warmup)
        yield from Action.each(pp_rank, "B", range(m - num_warmup, m))

    def bubble_fraction(self, shape: PipelineShape) -> float:
        """(p - 1) / (m + p - 1)."""
        p, m = shape.num_pp_ranks, shape.num_microbatches
        return (p - 1) / (m + p - 1)
