"""A refusal: every fault of a configuration, and ways out that were tried on all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from launcher.base.errors import Fault, LauncherError, PlanError
from launcher.contract.config import LaunchConfig
from launcher.plan.checked_job import CheckedJob, PlanInputs, examine
from launcher.plan.rules.checks import with_sources
from launcher.plan.rules.memory_fit import memory_faults, predict, state_faults
from launcher.plan.rules.search import Validate, together, with_fixes
from launcher.typed.read import Source

_MAX_TRIED_FORWARDS = 70_000
"""Forwards in the schedules of all layouts whose memory is predicted: about two seconds."""


def refusal(
    config: LaunchConfig, faults: Iterable[Fault], sources: Mapping[str, Source], inputs: PlanInputs
) -> PlanError:
    """What is raised for faults; each offers only what no rule refuses and what fits into memory."""

    found = tuple(faults)

    def validate(candidate: LaunchConfig) -> Sequence[Fault]:
        checked = examine(candidate, sources, inputs)
        return state_faults(checked.shape, checked.chosen) if isinstance(checked, CheckedJob) else checked

    last_validate = _memory_validation(sources, inputs)
    fitting = with_fixes(config, found, validate, last_validate)
    return PlanError(with_sources(fitting, sources), together(config, found, validate, last_validate))


def _memory_validation(sources: Mapping[str, Source], inputs: PlanInputs) -> Validate:
    """Judges the memory of a layout that breaks no rule, as long as its schedules are short."""
    spent = 0

    def validate(candidate: LaunchConfig) -> Sequence[Fault]:
        nonlocal spent
        found = examine(candidate, sources, inputs)
        if not isinstance(found, CheckedJob):  # a user's own model that was not measured
            return found
        shape = found.shape.pipeline
        spent += shape.num_pp_ranks * shape.num_chunks * shape.num_microbatches
        if spent > _MAX_TRIED_FORWARDS:
            raise LauncherError("this would take too long")
        return memory_faults(predict(found.shape, found.chosen).memory, found.shape, found.chosen)

    return validate
