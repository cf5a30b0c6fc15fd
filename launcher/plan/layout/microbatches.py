"""Rules on the number of microbatches, told in the sizes that a person sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from launcher.base.errors import Fault
from launcher.config.paths import blamed, value_at
from launcher.contract.actions import PipelineShape
from launcher.contract.config import BatchConfig, LaunchConfig
from launcher.contract.plan import BatchPlan
from launcher.plan.layout.batch import with_microbatches
from launcher.typed.read import Source

MAX_FORWARDS = 250_000
"""Forwards of a step over all ranks of a pipeline: with more, planning takes longer than ten seconds."""
_SHORT_FORWARDS = 50_000
"""What is proposed instead: planned within two seconds."""
_COUNT = "batch.num_microbatches"
_SHAPE = ("parallel.dp", "parallel.pp", "parallel.num_chunks", "parallel.schedule")


def length_faults(shape: PipelineShape, batch: BatchConfig) -> Iterator[Fault]:
    """A fault of a schedule that is too long to be written down, as of a batch that was given in tokens."""
    p, v, m = shape.num_pp_ranks, shape.num_chunks, shape.num_microbatches
    if p * v * m > MAX_FORWARDS:
        rule = (
            f"pp * num_chunks * num_microbatches = {p} * {v} * {m} = {p * v * m} forwards are more than "
            f"the {MAX_FORWARDS} that can be planned"
        )
        ways = [{_COUNT: max(_SHORT_FORWARDS // (p * v), 1)}]
        if batch.global_size is not None and batch.global_size % batch.seq_length == 0:
            ways.insert(0, {"batch.global_size": batch.global_size // batch.seq_length})
        yield Fault(_COUNT, m, rule, "global_size counts samples, not tokens.", ways=tuple(ways))


def explained(fault: Fault, config: LaunchConfig, sizes: BatchPlan, sources: Mapping[str, Source]) -> Fault:
    """A schedule's fault as one of the setting that was typed.

    A schedule knows only the number of microbatches; where that follows, it is told as one of the size
    that it follows from.
    """
    batch, own, origin = config.batch, [fault.path], f"{fault.path.partition('.')[2]} = {fault.given}"
    if fault.path == _COUNT:
        ways = [way for old in fault.ways for way in _in_sizes(old, config, sizes)]
        fault = replace(fault, ways=tuple(ways))
        if batch.num_microbatches is None and batch.global_size is not None:
            total, micro = sizes.global_size, sizes.micro_size
            dp = total // (micro * sizes.num_microbatches)
            own = ["batch.global_size", "batch.micro_size"]
            origin = f"num_microbatches = global_size / (micro_size * dp) = {total} / ({micro} * {dp})"
            origin += f" = {fault.given}"
    path = blamed((*own, *_SHAPE), sources)
    if path == fault.path:
        return fault
    return replace(fault, path=path, given=value_at(config, path), allowed=f"{origin}; {fault.allowed}")


def _in_sizes(way: Mapping[str, Any], config: LaunchConfig, sizes: BatchPlan) -> Iterator[Mapping[str, Any]]:
    """A way that sets the number of microbatches as ways that set sizes which are given."""
    if _COUNT not in way:
        yield way
        return
    others = {path: value for path, value in way.items() if path != _COUNT}
    for size in with_microbatches(config.batch, sizes, way[_COUNT]):
        yield {**others, **size}
