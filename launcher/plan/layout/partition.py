"""Which layers each stage holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

from launcher.base.arithmetic import divisors, listed, nearest_first
from launcher.base.errors import Fault
from launcher.base.units import counted
from launcher.config.paths import blamed
from launcher.contract.actions import PipelineShape
from launcher.contract.config import Recompute
from launcher.contract.model.shape import ModelShape
from launcher.contract.plan import StagePlan
from launcher.contract.strategy import JobShape
from launcher.typed.read import NO_SOURCES, Source

_SPLIT = "parallel.layers_per_stage"
_RECOMPUTE = "parallel.recompute"
_MAX_SIZES = 4
"""Sizes of one setting that are proposed, the nearest first."""


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The most even split; the first stages take what is left over.

    >>> split_layers(30, 4)
    (8, 8, 7, 7)
    """
    each, over = divmod(num_layers, num_stages)
    return tuple(each + (stage < over) for stage in range(num_stages))


def layer_faults(
    num_layers: int,
    pipeline: PipelineShape,
    layers_per_stage: Sequence[int] | str,
    sources: Mapping[str, Source] = NO_SOURCES,
) -> tuple[Fault, ...]:
    """Faults of a split, whichever way it was asked for; they name the setting that was typed."""
    given = {
        "parallel.pp": pipeline.num_pp_ranks,
        "parallel.num_chunks": pipeline.num_chunks,
        _SPLIT: layers_per_stage,
        "model.num_layers": num_layers,
    }
    if isinstance(layers_per_stage, str):
        path = blamed(tuple(given), sources)
        rules = (_even_rules if layers_per_stage == "even" else _auto_rules)(num_layers, pipeline)
        ways = _even_ways(num_layers, pipeline)
    else:
        path = blamed((_SPLIT, *given), sources)
        given[_SPLIT] = f"[{listed(layers_per_stage, ',')}]"
        rules = _list_rules(num_layers, pipeline, tuple(layers_per_stage))
        ways = _list_ways(num_layers, pipeline, len(layers_per_stage))
    proposed = tuple(ways)
    return tuple(Fault(path, given[path], rule, ways=proposed) for rule in rules)


def recompute_faults(job: JobShape, sources: Mapping[str, Source] = NO_SOURCES) -> list[Fault]:
    """Faults of what is to be computed again, of a job whose layers are split."""
    parallel, num_stages = job.config.parallel, job.pipeline.num_stages
    given, faults = parallel.recompute, []
    path = blamed((_RECOMPUTE, "parallel.pp", "parallel.num_chunks"), sources)
    if not isinstance(given, str):
        written = f"[{','.join(given)}]"
        if len(given) != num_stages:
            stages = counted(num_stages, "stage")
            rule = f"needs one of none, selective and full for each of {stages}, has {len(given)}"
            ways = tuple({_RECOMPUTE: mode} for mode in sorted(set(given)))
            faults.append(Fault(path, written, rule, ways=ways))
        if parallel.layers_per_stage == "auto":
            rule = "parallel.layers_per_stage=auto weighs layers before it knows their stages"
            faults.append(Fault(_RECOMPUTE, written, rule, ways=({_SPLIT: "even"},)))
    is_selective = any(stage.recompute == "selective" for stage in job.stages)
    if is_selective and any(layer.selective is None for layer in job.model.layers):
        rule = "selective knows the layers of gpt and llama models; a user's own can be recomputed whole"
        faults.append(Fault(_RECOMPUTE, given, rule, ways=({_RECOMPUTE: "full"}, {_RECOMPUTE: "none"})))
    return faults


def modes(recompute: Recompute | tuple[Recompute, ...], num_stages: int) -> tuple[Recompute, ...]:
    """What each stage computes again. A list of another length, which is a fault, counts as none."""
    if isinstance(recompute, tuple) and len(recompute) == num_stages:
        return recompute
    return tuple(repeat("none" if isinstance(recompute, tuple) else recompute, num_stages))


def make_stages(
    model: ModelShape,
    pipeline: PipelineShape,
    layers_per_stage: Sequence[int] | str,
    recompute: Recompute | tuple[Recompute, ...] = "none",
) -> tuple[StagePlan, ...]:
    """Every stage, in stage order. The split must be free of `layer_faults`."""
    num_stages = pipeline.num_stages
    even = isinstance(layers_per_stage, str)
    counts = split_layers(len(model.layers), num_stages) if even else tuple(map(int, layers_per_stage))
    stages, first = [], 0
    each_recomputes = modes(recompute, num_stages)
    for stage, count in enumerate(counts):
        before = model.layers[first - 1] if first else model.prologue
        layers = model.layers[first : first + count]
        stages.append(
            StagePlan(
                stage=stage,
                pp_rank=pipeline.pp_rank(stage),
                chunk=pipeline.chunk(stage),
                first_layer=first,
                num_layers=count,
                has_prologue=stage == 0 and model.prologue is not None,
                has_epilogue=stage == num_stages - 1 and model.epilogue is not None,
                input_shape=before.output_shape if stage and before else (),
                input_tensors=before.output_tensors if stage and before else (),
                recompute=each_recomputes[stage],
                num_frozen=sum(not layer.has_backward for layer in layers),
            )
        )
        first += count
    assert first == len(model.layers), f"stages hold {first} of {len(model.layers)} layers"
    return tuple(stages)


def _even_rules(num_layers: int, pipeline: PipelineShape) -> Iterator[str]:
    p, v = pipeline.num_pp_ranks, pipeline.num_chunks
    if num_layers % (p * v):
        rule = f"the model has {counted(num_layers, 'layer')} and {counted(v, 'chunk')} per rank, so "
        if v == 1:
            yield f"{rule}pp must divide {num_layers} ({listed(divisors(num_layers))})"
        else:
            yield f"{rule}pp * {v} = {p * v} must divide {num_layers}"


def _auto_rules(num_layers: int, pipeline: PipelineShape) -> Iterator[str]:
    if num_layers < pipeline.num_stages:
        stages = f"pp * num_chunks = {pipeline.num_pp_ranks} * {pipeline.num_chunks} = {pipeline.num_stages}"
        yield f"the model has {counted(num_layers, 'layer')}, and each of {stages} stages needs one"


def _list_rules(num_layers: int, pipeline: PipelineShape, counts: tuple[int, ...]) -> Iterator[str]:
    p, v = pipeline.num_pp_ranks, pipeline.num_chunks
    if len(counts) != p * v:
        stages = counted(p * v, "stage")
        yield f"needs one number for each of pp * num_chunks = {p} * {v} = {stages}, has {len(counts)}"
    if sum(counts) != num_layers:
        total = counted(sum(counts), "layer")
        sums = f"{' + '.join(map(str, counts))} = {total}" if len(counts) > 1 else total
        yield f"the stages hold {sums}, the model has {num_layers}"
    if min(counts, default=1) < 1:
        yield f"stage {counts.index(min(counts))} would hold no layer"


def _even_ways(num_layers: int, pipeline: PipelineShape) -> Iterator[Mapping[str, Any]]:
    p, v = pipeline.num_pp_ranks, pipeline.num_chunks
    nearest, *others = _sizes("parallel.pp", p, num_layers, v)
    yield nearest
    if num_layers >= p * v:
        yield {_SPLIT: "auto"}
    yield from _sizes("parallel.num_chunks", v, num_layers, p)
    yield from others


def _list_ways(num_layers: int, pipeline: PipelineShape, length: int) -> Iterator[Mapping[str, Any]]:
    p, v = pipeline.num_pp_ranks, pipeline.num_chunks
    if num_layers >= p * v:
        yield {_SPLIT: "even" if num_layers % (p * v) == 0 else "auto"}
    if length and length % v == 0:
        yield {"parallel.pp": length // v}
    if length and length % p == 0:
        yield {"parallel.num_chunks": length // p}
    for size in _sizes("parallel.pp", p, num_layers, v):
        yield {**size, _SPLIT: "even"}


def _sizes(path: str, wanted: int, num_layers: int, other: int) -> list[Mapping[str, Any]]:
    """Values of one setting that, times the other one, divide the layers; the nearest first."""
    choices = divisors(num_layers // other) if num_layers % other == 0 else (1,)
    return [{path: size} for size in nearest_first(wanted, choices)[:_MAX_SIZES]]
