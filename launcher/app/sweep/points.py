"""The points of a sweep, each composed and planned on its own: what can run, and what is refused and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.app.checks import input_faults
from launcher.app.ending import say, shown, text_width
from launcher.app.launch import local_faults
from launcher.app.prepared_run import make_plan
from launcher.app.request import Request
from launcher.app.submission import with_executor
from launcher.app.sweep.grid import SECTION, Point, grid
from launcher.app.sweep.store import NewSweep, Sweep, make_sweep
from launcher.app.sweep.tables import Refusal, refusals
from launcher.base.errors import ConfigError, Fault, LauncherError, PlanError
from launcher.base.units import counted
from launcher.config.compose import draft, group_files
from launcher.contract.plan import Plan
from launcher.plan.rules.checks import with_sources
from launcher.runs.render import executor_of, render
from launcher.runs.store import absolute


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


def _render_faults(plan: Plan) -> Iterable[Fault]:
    """Why the executor cannot start a plan."""
    try:
        render(plan, absolute(plan.config.run.root))
    except PlanError as error:
        return error.faults
    return ()


def submit_faults(plan: Plan) -> Iterable[Fault]:
    """Why a plan that a scheduler is to have cannot be submitted."""
    return () if executor_of(plan).is_local else _render_faults(plan)


def start_faults(plan: Plan) -> Iterable[Fault]:
    """Why a plan cannot be started from here, be it on this machine or by a scheduler."""
    is_local = executor_of(plan).is_local
    here = local_faults(plan) if is_local else _render_faults(plan)
    return [*here, *input_faults(plan, is_here=is_local)]


def plan_points(given: Request, *, starts: bool) -> Points:
    """Composes and plans every point of a sweep; those that cannot be submitted, or with ``starts`` not be
    started from here, are refused.

    Raises:
        ConfigError: when the words make no sweep.
        LauncherError: when the recipe cannot be composed at all.
    """
    section = draft(given.recipe).values.get(SECTION)
    found = grid(given.overrides, section, lambda group: group_files(given.recipe, group), given.recipe)
    head = _executor_word(given.recipe, found.points[0])
    check = start_faults if starts else submit_faults
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
    words = with_executor(Request(recipe=recipe, overrides=point.overrides))
    return words.overrides[: len(words.overrides) - len(point.overrides)]


def _refusal(point: Point, error: LauncherError) -> Refusal:
    faults = error.faults if isinstance(error, ConfigError) else (Fault(SECTION, point.label, str(error)),)
    return Refusal(label=point.label, overrides=point.overrides, faults=faults)


def new_sweep(points: Points) -> Sweep:
    """Makes the directory of a sweep and says what it is.

    Raises:
        ConfigError: when it cannot be made.
    """
    first = points.plans[0]
    new = NewSweep(
        name=first.config.name,
        recipe=points.recipe,
        words=points.words,
        points=tuple(item.point for item in points.planned),
        refused=points.refused,
    )
    sweep = make_sweep(first.config.run, new)
    for note in points.notes:
        say(f"note: {note}")
    if points.refused:
        say("\n".join(refusals(points.refused, text_width())) + "\n")
    count = counted(len(points.planned) + len(points.refused), "point")
    say(f"{len(points.planned)} of {count} to run = {points.dims}, in {shown(sweep.path)}")
    return sweep
