"""Predicted times of layers brought to what a run measured of its stages.

A run measures the forwards and backwards of whole stages. Every kind of layer (the embedding, a block, the
head) gets a factor on its predicted times, such that the sums of the stages come as near to the measured
ones as they can. What no stage tells apart keeps its predicted proportion: a run of one stage says how fast
the device is, one of two how long the head takes beside a block.

Source: Shepp and Vardi, Maximum Likelihood Reconstruction (1982), equation 2.13: the iteration, whose factors
never become negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.base.errors import Fault, LauncherError
from launcher.contract.plan import Plan
from launcher.contract.strategy import JobShape, LayerKind
from launcher.plan.cost.compute import PartTimes, kind_of, part_times
from launcher.typed.differences import differences
from launcher.typed.read import plain

_PATH = "device.measured_in"
_CONDITIONS = (
    "model",
    "batch.micro_size",
    "batch.seq_length",
    "parallel.tp",
    "parallel.sequence_parallel",
    "parallel.recompute",
    "precision.compute",
    "fusion.attention",
    "fusion.compile",
    "device.name",
)
"""What the time of a layer depends on."""
_MOST_ROUNDS = 1000
_NEAR = 1e-6
"""Factors that change by no more are found."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run, and seconds of one microbatch on each of its stages."""

    plan: Plan
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    """The whole backward, deferred weight gradients included."""


def measured_faults(job: JobShape, run: MeasuredRun | LauncherError | None) -> list[Fault]:
    """Why `device.measured_in`, where it is set, says nothing of this job. ``run``: what was read of it."""
    path = job.config.device.measured_in
    if path is None:
        return []
    assert run is not None, "the run that device.measured_in names is read before it is planned with"
    if isinstance(run, LauncherError):
        return [Fault(_PATH, path, f"cannot be read: {run}", ways=({_PATH: None},))]
    differing = [*differences(plain(run.plan.config), plain(job.config), _CONDITIONS, ("model.name",))]
    if job.config.model.family == "custom":  # the code behind one name may have changed
        num_layers = sum(stage.num_layers for stage in run.plan.stages)
        counts = {"layers": (num_layers, len(job.model.layers))}
        counts["parameters"] = (run.plan.num_parameters, job.model.num_parameters)
        num_trained = run.plan.num_parameters - run.plan.num_frozen_parameters
        counts["parameters to train"] = (num_trained, job.model.num_trained_parameters)
        differing += [(name, there, here) for name, (there, here) in counts.items() if there != here]
    if not differing:
        return []
    named = ", ".join(f"{name} ({there} there, {here} here)" for name, there, here in differing)
    rule = f"measured other work: {named}"
    fix = f"Give a run that differs in nothing of that, or {_PATH}=null."
    return [Fault(_PATH, path, rule, fix, ways=({_PATH: None},))]


def with_measured_times(job: JobShape, run: MeasuredRun | LauncherError | None) -> JobShape:
    """The job with its times brought to what was measured, where that is asked for. It must be free of
    `measured_faults`."""
    if job.config.device.measured_in is None or not isinstance(run, MeasuredRun):
        return job
    stages = [_parts(job, run, stage) for stage in range(len(run.plan.stages))]
    forward = fitted([_shares(parts, lambda times: times.forward_s) for parts in stages], run.forward_s)
    backward = fitted([_shares(parts, lambda times: times.backward_s) for parts in stages], run.backward_s)
    return replace(job, time_factors={kind: (forward[kind], backward[kind]) for kind in forward})


def fitted(shares: Sequence[Mapping[LayerKind, float]], totals: Sequence[float]) -> dict[LayerKind, float]:
    """Factors of the kinds such that each stage's shares, multiplied by them, sum to its total, as nearly as
    can be. ``shares``: per stage, the predicted seconds of each kind in it; a stage without any says
    nothing."""
    overall = _ratio(sum(totals), sum(sum(stage.values()) for stage in shares))
    factors = {kind: overall for stage in shares for kind in stage}
    whole = {kind: sum(stage.get(kind, 0.0) for stage in shares) for kind in factors}
    for _ in range(_MOST_ROUNDS):
        ratios = [
            _ratio(total, sum(share * factors[kind] for kind, share in stage.items()))
            for stage, total in zip(shares, totals, strict=True)
        ]
        changes = {
            kind: sum(s.get(kind, 0.0) * ratio for s, ratio in zip(shares, ratios, strict=True)) / size
            for kind, size in whole.items()
            if size
        }
        factors |= {kind: factors[kind] * change for kind, change in changes.items()}
        if all(abs(change - 1) < _NEAR for change in changes.values()):
            break
    return factors


def _ratio(measured_s: float, predicted_s: float) -> float:
    return measured_s / predicted_s if predicted_s else 1.0


def _parts(job: JobShape, run: MeasuredRun, stage: int) -> list[tuple[LayerKind, PartTimes]]:
    """The layers and ends of a stage of the run, by kind, with their predicted times."""
    return [(kind_of(*part), part_times(job, *part)) for part in job.parts(run.plan.stages[stage])]


def _shares(
    parts: Sequence[tuple[LayerKind, PartTimes]], seconds: Callable[[PartTimes], float]
) -> dict[LayerKind, float]:
    found: dict[LayerKind, float] = {}
    for kind, times in parts:
        found[kind] = found.get(kind, 0.0) + seconds(times)
    return found
