"""The pipeline's idle time: what was measured, beside what the measured forwards and backwards explain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.base.arithmetic import weighted_median
from launcher.contract.actions import COMPUTE as COMPUTE_ACTIONS
from launcher.contract.actions import Action, PipelineShape
from launcher.contract.records import COMPUTE, PIPELINE_WAIT, Part
from launcher.metrics.blocked_time import waited_ns
from launcher.report.runs import Run
from launcher.schedule.simulate import replay

NS = 1e-9
_OVER_STAGES = ("tied", "model")
"""Collectives whose members are of several stages."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Measured median times of one stage and microbatch, in seconds; 0.0 where it has no such action."""

    stage: int
    forward_s: float
    backward_s: float
    weight_s: float


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """Idle share of the pipeline ranks' time: idle / (idle + compute)."""

    measured: float
    """Waiting for another stage, as the ranks recorded it: for its messages, and once their own part of the
    schedule is done, in the first collective that all stages are needed for."""
    idle_s: float
    """The same in seconds of a step, the mean over the ranks."""
    replayed: float
    """By simulation of the run's own schedule with every action's own measured time and free messages:
    the part that the schedule and uneven stages explain."""
    stages: tuple[StageTimes, ...]


def bubble(run: Run) -> Bubble | None:
    """The idle time of a run; None without a pipeline."""
    plan = run.plan
    if plan.mesh.pp == 1:
        return None
    lists, times = plan.lists, _times(run)
    kinds = run.work.kinds_ns
    headers = run.records.headers
    at_the_end = sum(waited_ns(headers, rows, _OVER_STAGES) for rows in run.measured)
    idle = kinds[PIPELINE_WAIT] + at_the_end
    return Bubble(
        measured=idle / (idle + kinds[COMPUTE]),
        idle_s=idle * NS / run.work.num_steps / len(headers),
        replayed=replay(lists, plan.pipeline, times, transfer_s=0.0).bubble_fraction,
        stages=_stages(lists, times, plan.pipeline),
    )


def stage_times(run: Run) -> tuple[StageTimes, ...]:
    """What one microbatch took on every stage of a run."""
    return _stages(run.plan.lists, _times(run), run.plan.pipeline)


def _times(run: Run) -> list[list[float]]:
    """Seconds of each compute action of every pp_rank: the median over its ranks and the measured steps."""
    found: list[list[Part]] = [[] for _ in range(run.plan.mesh.pp)]
    for rows in run.measured:
        for header, row in zip(run.records.headers, rows, strict=True):
            found[header.pp_rank].append(row)
    return [[seconds * NS for seconds in _medians(own)] for own in found]


def _medians(rows: Sequence[Part]) -> Iterator[float]:
    """The median time of each action."""
    weights = [row.num_steps for row in rows]
    for times in zip(*(row.compute_ns for row in rows), strict=True):
        yield weighted_median(zip(times, weights, strict=True))


def _stages(
    lists: Sequence[Sequence[Action]], times: Sequence[Sequence[float]], shape: PipelineShape
) -> tuple[StageTimes, ...]:
    found: dict[tuple[int, str], list[float]] = {}
    for actions, seconds in zip(lists, times, strict=True):
        compute = [action for action in actions if action.kind in COMPUTE_ACTIONS]
        for (stage, kind, _), duration in zip(compute, seconds, strict=True):
            found.setdefault((stage, kind), []).append(duration)
    middle = {key: median(durations) for key, durations in found.items()}
    return tuple(
        StageTimes(
            stage=stage,
            forward_s=middle.get((stage, "F"), 0.0),
            backward_s=middle.get((stage, "B"), 0.0),
            weight_s=middle.get((stage, "W"), 0.0),
        )
        for stage in range(shape.num_stages)
    )
