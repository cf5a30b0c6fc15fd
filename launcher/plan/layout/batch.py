"""global_size = micro_size * num_microbatches * dp: two or three unknowns from what was given.

A schedule's rules on the number of microbatches are told in the sizes that a person sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from launcher.base.arithmetic import divisors, multiples_around, nearest_first
from launcher.base.errors import Fault
from launcher.config.paths import blamed, value_at
from launcher.contract.actions import PipelineShape
from launcher.contract.config import BatchConfig, LaunchConfig
from launcher.contract.plan import BatchPlan
from launcher.typed.read import NO_SOURCES, Source

_GLOBAL, _MICRO, _COUNT = "batch.global_size", "batch.micro_size", "batch.num_microbatches"
_MAX_SIZES = 2
"""Values of one size that are proposed, the nearest first."""
_SHAPE = ("parallel.dp", "parallel.pp", "parallel.num_chunks", "parallel.schedule")
MAX_FORWARDS = 250_000
"""Forwards of a step over all ranks of a pipeline: with more, planning takes longer than ten seconds."""
_SHORT_FORWARDS = 50_000
"""What is proposed instead: planned within two seconds."""


def solve(batch: BatchConfig, dp: int, sources: Mapping[str, Source] = NO_SOURCES) -> BatchPlan | Fault:
    """The sizes that satisfy the equation, or why there are none."""
    total, micro, count = batch.global_size, batch.micro_size, batch.num_microbatches
    if total is None and micro is None and count is None:
        rule = "one of global_size, micro_size and num_microbatches is needed"
        return Fault(_GLOBAL, "null", rule, ways=({_GLOBAL: dp},))
    assumed = dict.fromkeys(_assumed(batch), 1)
    micro, count = assumed.get(_MICRO, micro), assumed.get(_COUNT, count)
    values = {_GLOBAL: total, _MICRO: micro, _COUNT: count, "parallel.dp": dp}
    known = {path: value for path, value in values.items() if value is not None}
    if fault := _fault(known, sources):
        return fault
    of_others = prod(value for path, value in known.items() if path != _GLOBAL)
    rest = 1 if total is None else total // of_others
    return BatchPlan(
        global_size=of_others if total is None else total,
        micro_size=rest if micro is None else micro,
        num_microbatches=rest if count is None else count,
        seq_length=batch.seq_length,
    )


def assumed_note(batch: BatchConfig) -> str:
    """Says which sizes are assumed; empty where none is."""
    assumed = _assumed(batch)
    return f"{' and '.join(assumed)}: not given, taken as 1." if assumed else ""


def _assumed(batch: BatchConfig) -> list[str]:
    """The sizes that are 1, because they neither are given nor follow: ``micro_size``, then
    ``num_microbatches``."""
    total, micro, count = batch.global_size, batch.micro_size, batch.num_microbatches
    micros = [_MICRO] if micro is None and None in (total, count) else []
    return micros + ([_COUNT] if count is None and total is None else [])


def with_microbatches(batch: BatchConfig, sizes: BatchPlan, count: int) -> Iterator[Mapping[str, Any]]:
    """Changes of the sizes that are given by which there are ``count`` microbatches.

    >>> batch = BatchConfig(global_size=10, micro_size=1, num_microbatches=None, seq_length=1)
    >>> sizes = BatchPlan(global_size=10, micro_size=1, num_microbatches=5, seq_length=1)
    >>> list(with_microbatches(batch, sizes, 4)), list(with_microbatches(batch, sizes, 1))
    ([{'batch.global_size': 8}], [{'batch.global_size': 2}, {'batch.micro_size': 5}])
    """
    share = sizes.global_size // sizes.num_microbatches
    given = {} if batch.num_microbatches is None else {_COUNT: count}
    if batch.global_size is None:
        yield {_COUNT: count}
        return
    yield {**given, _GLOBAL: share * count}
    micro, over = divmod(sizes.global_size * sizes.micro_size, share * count)
    if not over and batch.micro_size is not None:
        yield {**given, _MICRO: micro}


def _fault(known: Mapping[str, int], sources: Mapping[str, Source]) -> Fault | None:
    """Why the global size is not what the other known sizes make of it; with all of them known it is
    their product, else a multiple of that."""
    total = known.get(_GLOBAL)
    others = {path: value for path, value in known.items() if path != _GLOBAL}
    unit, is_whole = prod(others.values()), len(known) == 4
    if total is None or (total == unit if is_whole else total % unit == 0):
        return None
    names = " * ".join(path.partition(".")[2] for path in others)
    arithmetic = f"{names} = {' * '.join(map(str, others.values()))} = {unit}"
    path = blamed(tuple(known), sources)
    subject = "must" if path == _GLOBAL else f"global_size = {total} must"
    rule = f"{subject} be {arithmetic}"
    if not is_whole:
        rule = f"{subject} be a multiple of {arithmetic}; {total}/{unit} is not whole"
    ways = [way for name in dict.fromkeys((path, *known)) for way in _ways(name, known, is_whole=is_whole)]
    return Fault(path, known[path], rule, ways=tuple(ways))


def _ways(path: str, known: Mapping[str, int], *, is_whole: bool) -> list[Mapping[str, Any]]:
    """Values of one size that go with the others."""
    total, unit = known[_GLOBAL], prod(value for name, value in known.items() if name != _GLOBAL)
    if path == _GLOBAL:
        sizes = [unit] if is_whole else list(multiples_around(total, unit))
    else:
        room, over = divmod(total, unit // known[path])
        sizes = [] if over or not room else [room] if is_whole else nearest_first(known[path], divisors(room))
    return [{path: size} for size in sizes[:_MAX_SIZES]]


def length_faults(shape: PipelineShape, batch: BatchConfig) -> Iterator[Fault]:
    """A fault of a schedule that is too long to be written down, as of a batch that was given in tokens."""
    p, v, m = shape.num_pp_ranks, shape.num_chunks, shape.num_microbatches
    if p * v * m > MAX_FORWARDS:
        rule = (
            f"pp * num_chunks * num_microbatches = {p} * {v} * {m} = {p * v * m} forwards are more than "
            f"the {MAX_FORWARDS} that can be planned; global_size counts samples, not tokens"
        )
        ways = [{_COUNT: max(_SHORT_FORWARDS // (p * v), 1)}]
        if batch.global_size is not None and batch.global_size % batch.seq_length == 0:
            ways.insert(0, {"batch.global_size": batch.global_size // batch.seq_length})
        yield Fault(_COUNT, m, rule, ways=tuple(ways))


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
