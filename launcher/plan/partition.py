"""Which layers each stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import Fault
from launcher.plan.arithmetic import divisors, listed, nearest_of
from launcher.plan.model import ModelShape, StagePlan
from launcher.schedule.actions import PipelineShape


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The most even split; the first stages take what is left over.

    >>> split_layers(30, 4)
    (8, 8, 7, 7)
    """
    each, over = divmod(num_layers, num_stages)
    return tuple(each + (stage < over) for stage in range(num_stages))


def layer_faults(
    num_layers: int, pipeline: PipelineShape, layers_per_stage: Sequence[int] | str
) -> tuple[Fault, ...]:
    """Faults of a split, whichever way it was asked for."""
    if isinstance(layers_per_stage, str):
        return _even_faults(num_layers, pipeline)
    return _list_faults(num_layers, pipeline, tuple(layers_per_stage))


def make_stages(
    model: ModelShape, pipeline: PipelineShape, layers_per_stage: Sequence[int] | str
) -> tuple[StagePlan, ...]:
    """Every stage, in stage order. The split must be free of `layer_faults`."""
    num_stages = pipeline.num_stages
    even = isinstance(layers_per_stage, str)
    counts = split_layers(len(model.layers), num_stages) if even else tuple(map(int, layers_per_stage))
    stages, first = [], 0
    for stage, count in enumerate(counts):
        before = model.layers[first - 1] if first else model.prologue
        stages.append(
            StagePlan(
                stage=stage,
                pp_rank=pipeline.pp_rank(stage),
                chunk=stage // pipeline.num_pp_ranks,
                first_layer=first,
                num_layers=count,
                has_prologue=stage == 0 and model.prologue is not None,
                has_epilogue=stage == num_stages - 1 and model.epilogue is not None,
                input_shape=before.output_shape if stage and before else (),
            )
        )
        first += count
    assert first == len(model.layers), f"stages hold {first} of {len(model.layers)} layers"
    return tuple(stages)


def _even_faults(num_layers: int, pipeline: PipelineShape) -> tuple[Fault, ...]:
    p, v = pipeline.num_pp_ranks, pipeline.num_chunks
    if num_layers % (p * v) == 0:
        return ()
    chunks = "1 chunk" if v == 1 else f"{v} chunks"
    choices = divisors(num_layers // v) if num_layers % v == 0 else ()
    rule = f"the model has {num_layers} layers and {chunks} per rank, so "
    rule += f"pp must divide {num_layers}" if v == 1 else f"pp * {v} = {p * v} must divide {num_layers}"
    rule += f" ({listed(choices)})" if v == 1 else ""
    ways = [f"set parallel.pp={nearest_of(p, choices)}"] if choices else []
    if v > 1 and num_layers % p == 0:
        ways.append(f"set parallel.num_chunks={nearest_of(v, divisors(num_layers // p))}")
    if num_layers >= p * v:
        ways.append(f"give parallel.layers_per_stage=[{listed(split_layers(num_layers, p * v), ',')}]")
    fix = ", or ".join(ways) or "set parallel.pp=1 parallel.num_chunks=1"
    return (Fault("parallel.pp", p, rule, f"{fix[0].upper()}{fix[1:]}."),)


def _list_faults(num_layers: int, pipeline: PipelineShape, counts: tuple[int, ...]) -> tuple[Fault, ...]:
    p, v = pipeline.num_pp_ranks, pipeline.num_chunks
    path, given = "parallel.layers_per_stage", f"[{listed(counts, ',')}]"
    fix = f"Set parallel.layers_per_stage=[{listed(split_layers(num_layers, p * v), ',')}]."
    if num_layers < p * v:
        fix = f"Set parallel.pp={nearest_of(p, divisors(num_layers))} parallel.num_chunks=1."
    faults = []
    if len(counts) != p * v:
        rule = f"needs one number for each of pp * num_chunks = {p} * {v} = {p * v} stages, has {len(counts)}"
        faults.append(Fault(path, given, rule, fix))
    if sum(counts) != num_layers:
        total = f"{' + '.join(map(str, counts))} = {sum(counts)}"
        rule = f"the stages hold {total} layers, the model has {num_layers}"
        faults.append(Fault(path, given, rule, fix))
    if min(counts, default=1) < 1:
        rule = f"stage {counts.index(min(counts))} would hold no layer"
        faults.append(Fault(path, given, rule, fix))
    return tuple(faults)
