"""Model parallelism without a pipeline: one microbatch at a time, forward to the end and back again.

Three ranks and two microbatches, a row per rank, time to the right (a backward takes two slots):

    0  0 · · · · · · 0━━ 1 · · · · · · 1━━
    1  · 0 · · · 0━━ · · · 1 · · · 1━━ · ·
    2  · · 0 0━━ · · · · · · 1 1━━ · · · ·

One rank works while all others wait: the starting point that pipelining improves on.
"""

from collections.abc import Iterable

from launcher.interfaces import Action, Fault, PipelineShape


class OneAtATime:
    """Each microbatch forward and backward before the next one starts."""

    def check(self, shape: PipelineShape) -> Iterable[Fault]:
        """Refuses more than one model chunk per rank."""
        if shape.num_chunks > 1:
            rule = "one_at_a_time runs one model chunk per pipeline rank"
            yield Fault("parallel.num_chunks", shape.num_chunks, rule, "Set parallel.num_chunks=1.")

    def actions(self, shape: PipelineShape, pp_rank: int) -> Iterable[Action]:
        """Forward and backward of every microbatch in turn."""
        for microbatch in range(shape.num_microbatches):
            yield Action(pp_rank, "F", microbatch)
            yield Action(pp_rank, "B", microbatch)

    def bubble_fraction(self, shape: PipelineShape) -> float:
        """(p - 1) / p: of p ranks, one works at a time."""
        return (shape.num_pp_ranks - 1) / shape.num_pp_ranks
