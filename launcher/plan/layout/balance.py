"""Layers over stages so that no stage is slower than it must be (``layers_per_stage: auto``).

The slowest stage sets the pace of a pipeline. The first stage also looks tokens up and the last one
also computes the logits, so an even number of layers is seldom an even amount of time:

    a head as long as two layers, 16 layers, 4 stages
    even    4 4 4 4+head   the slowest stage takes 6
    auto    5 4 5 2+head   the slowest stage takes 5
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from launcher.contract.strategy import JobShape, Parallel
from launcher.plan.cost.timing import predict_costs
from launcher.plan.cost.traffic import rank_costs
from launcher.plan.layout.partition import make_stages

_UNITS = 10**12
"""Costs become whole numbers, so that equal ones stay equal when they are summed in another order."""


def layer_costs(job: JobShape, parallels: Sequence[Parallel]) -> tuple[float, ...]:
    """Predicted seconds of one microbatch's forward and backward through every layer, with what the
    layer waits for; the first also counts the prologue and the last the epilogue."""
    alone = replace(job.pipeline, num_pp_ranks=len(job.model.layers), num_chunks=1)
    stages = make_stages(job.model, alone, "even", job.config.parallel.recompute)
    job = replace(job, pipeline=alone, stages=stages)
    costs = predict_costs(job, rank_costs(job, parallels))
    return tuple(map(sum, zip(costs.forward_s, costs.backward_s, strict=True)))


def stage_sums(costs: Sequence[float], counts: Iterable[int]) -> list[float]:
    """What the stages cost that hold so many layers each.

    >>> stage_sums([1, 2, 3], [1, 2])
    [1, 5]
    """
    cuts = [0, *accumulate(counts)]
    return [sum(costs[start:end]) for start, end in pairwise(cuts)]


def balanced_split(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Layers of every stage such that the largest sum of costs in a stage is as small as can be.

    Every stage gets a layer. Of all such splits one with the other stages near their mean. Costs are
    told apart down to one part in 10^12 of the largest.

    >>> balanced_split([1] * 15 + [3], 4)
    (5, 4, 5, 2)
    """
    assert len(costs) >= num_stages >= 1, f"{len(costs)} layers for {num_stages} stages"
    unit = max(costs) / _UNITS or 1.0
    before = [0, *accumulate(round(cost / unit) for cost in costs)]
    limit = _least_limit(before, num_stages)
    cuts = [0]
    for stage, earliest in enumerate(_earliest_cuts(before, num_stages, limit)):
        first, left = cuts[-1], num_stages - stage
        latest = min(bisect_right(before, before[first] + limit) - 1, len(costs) - left + 1)
        mean = before[first] + (before[-1] - before[first]) / left
        choices = range(max(earliest, first + 1), latest + 1)
        cuts.append(min(choices, key=lambda cut: (abs(before[cut] - mean), cut)))
    return tuple(end - start for start, end in pairwise(cuts))


def _least_limit(before: Sequence[int], num_stages: int) -> int:
    """The smallest cost that no stage needs to exceed. ``before``: the cost of all layers before each."""
    limits = range(max(end - start for start, end in pairwise(before)), before[-1] + 1)
    return limits[bisect_left(limits, True, key=lambda limit: _fits(before, num_stages, limit))]


def _fits(before: Sequence[int], num_stages: int, limit: int) -> bool:
    """Whether stages filled one after the other up to a limit hold every layer. Fewer stages will do:
    one of several layers can be cut in two."""
    end = 0
    for _ in range(num_stages):
        end = bisect_right(before, before[end] + limit) - 1
    return end == len(before) - 1


def _earliest_cuts(before: Sequence[int], num_stages: int, limit: int) -> list[int]:
    """For every stage, the fewest layers before its end that leave no more than the later stages can take."""
    cuts = [len(before) - 1]
    for stage in range(num_stages - 1, 0, -1):
        cuts.append(max(bisect_left(before, before[cuts[-1]] - limit), stage))
    return cuts[::-1]
