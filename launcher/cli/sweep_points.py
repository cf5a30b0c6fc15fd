"""The points of a sweep, each composed and planned on its own: what can run, and what is refused and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.cli.planning import make_plan
from launcher.cli.submission import with_executor
from launcher.cli.words import Words
from launcher.config.compose import draft, group_files
from launcher.errors import ConfigError, Fault, LauncherError, PlanError
from launcher.jobs.render import executor_of, render
from launcher.jobs.store import absolute
from launcher.plan.checks import with_sources
from launcher.plan.model import Plan
from launcher.sweep.grid import SECTION, Point, grid
from launcher.sweep.tables import Refusal

Check = Callable[[Plan], Iterable[Fault]]
"""What is asked of a plan beyond that it can be planned."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A point that can run."""

    point: Point
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Points:
    """A sweep, planned."""

    recipe: str
    words: tuple[str, ...]
    """The overrides as they were typed."""
    dims: str
    planned: tuple[Planned, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]
    """Of the files that were composed."""

    @property
    def plans(self) -> list[Plan]:
        """Those of the points that can run."""
        return [item.plan for item in self.planned]

    @property
    def is_local(self) -> bool:
        """Whether the points start on this machine, one after the other.

        Raises:
            ConfigError: when they differ in that.
        """
        names = {plan.config.executor.name for plan in self.plans}
        if len(names) > 1:
            rule = "the points of a sweep are started in one way"
            raise ConfigError([Fault("executor.name", ",".join(sorted(names)), rule, "Choose one executor.")])
        return executor_of(self.plans[0]).is_local


def placed(plan: Plan, path: Path) -> Plan:
    """The plan of a run in this directory."""
    run = replace(plan.config.run, dir=str(path))
    return replace(plan, config=replace(plan.config, run=run))


def start_faults(plan: Plan) -> Iterable[Fault]:
    """Why the executor cannot start a plan."""
    try:
        render(plan, absolute(plan.config.run.root))
    except PlanError as error:
        return error.faults
    return ()


def submit_faults(plan: Plan) -> Iterable[Fault]:
    """Why a plan that a scheduler is to have cannot be submitted."""
    return () if executor_of(plan).is_local else start_faults(plan)


def plan_points(given: Words, check: Check) -> Points:
    """Composes and plans every point of a sweep.

    Raises:
        ConfigError: when the words make no sweep.
        LauncherError: when the recipe cannot be composed at all.
    """
    section = draft(given.recipe).values.get(SECTION)
    found = grid(given.overrides, section, lambda group: group_files(given.recipe, group), given.recipe)
    head = _executor_word(given.recipe, found.points[0])
    planned, refused = [], []
    notes: dict[str, None] = {}
    for point in found.points:
        placed = Point(overrides=(*head, *point.overrides), label=point.label)
        try:
            made = make_plan(given.recipe, placed.overrides)
            if faults := list(check(made.plan)):
                raise ConfigError(with_sources(faults, made.composed.sources))
        except LauncherError as error:
            refused.append(_refusal(placed, error))
        else:
            planned.append(Planned(point=placed, plan=made.plan))
            notes |= dict.fromkeys(made.composed.notes)
    return Points(
        recipe=given.recipe,
        words=given.overrides,
        dims=found.dims,
        planned=tuple(planned),
        refused=tuple(refused),
        notes=tuple(notes),
    )


def _executor_word(recipe: str, point: Point) -> Sequence[str]:
    """The executor that a site asks for where none is chosen that has a site."""
    site = draft(recipe, point.overrides).values.get("site")
    if not isinstance(site, dict) or site.get("name") in (None, "none"):
        return ()
    words = with_executor(Words(recipe=recipe, overrides=point.overrides, flags={}))
    return words.overrides[: len(words.overrides) - len(point.overrides)]


def _refusal(point: Point, error: LauncherError) -> Refusal:
    faults = error.faults if isinstance(error, ConfigError) else (Fault(SECTION, point.label, str(error)),)
    return Refusal(label=point.label, overrides=point.overrides, faults=faults)
