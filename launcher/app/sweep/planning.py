"""The points of a sweep before their first start: composed, planned or refused, and recorded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.app.launch import with_executor
from launcher.app.lifecycle import PreparedRun, prepared
from launcher.app.output import Output, shown, text_width
from launcher.app.planning import make_plan
from launcher.app.preflight import executor_faults, refuse, seen_faults, source_notes, start_faults
from launcher.app.request import Request
from launcher.app.sweep.grid import SECTION, grid
from launcher.app.sweep.point import PlannedSweep, Point
from launcher.app.sweep.store import Sweep, make_sweep
from launcher.app.sweep.tables import refusals
from launcher.app.trust.check import NotTrustedError
from launcher.base.errors import ConfigError, Fault, JobError, LauncherError
from launcher.base.units import counted
from launcher.config.compose import Composed, compose, group_files
from launcher.config.overrides import split
from launcher.config.paths import mapped
from launcher.contract.job import CHECKPOINTS
from launcher.contract.plan import Plan
from launcher.runs.record import Origin, write_plan
from launcher.runs.render import executor_of
from launcher.runs.resume import forget_inputs
from launcher.runs.store import (
    START_FOLDERS,
    SUBFOLDERS,
    RunDirectory,
    check_idle,
    fresh_folders,
    hold,
    new_directory,
    released,
    saved_steps,
)


def plan_sweep(given: Request, *, starts: bool = False) -> PlannedSweep:
    """Composes and plans every point of a sweep; those that cannot be submitted, or with ``starts`` not be
    started from here, are refused.

    Raises:
        ConfigError: when the words make no sweep.
        LauncherError: when the recipe cannot be composed at all.
    """
    section = _section(compose(given.recipe))
    found, dims = grid(given.overrides, section, lambda group: group_files(given.recipe, group), given.recipe)
    head = _executor_word(given.recipe, found[0])
    typed = {split(word)[0] for word in given.overrides}
    points: list[Point] = []
    refused: list[Point] = []
    notes: dict[str, None] = {}
    for item in found:
        point = replace(item, overrides=(*head, *item.overrides))
        swept = set(item.overrides) - set(given.overrides)
        of_recipe = {word for word in item.overrides if split(word)[0] not in typed}
        try:
            made = make_plan(given.recipe, point.overrides, swept, of_recipe=of_recipe, allow=given.allow)
            refuse(_faults(made.plan, starts=starts), made.composed.sources)
        except NotTrustedError:  # which is no property of one point
            raise
        except LauncherError as error:
            refused.append(replace(point, faults=_faults_of(error, point)))
        else:
            points.append(replace(point, planned=made.plan, index=len(points)))
            notes |= dict.fromkeys((*made.composed.notes, *source_notes(made.plan)))
    _check_files(points)
    return PlannedSweep(
        recipe=given.recipe,
        words=given.overrides,
        dims=dims,
        points=tuple(points),
        refused=tuple(refused),
        notes=tuple(notes),
    )


def _check_files(points: Sequence[Point]) -> None:
    """Each point has figures of its own.

    Raises:
        ConfigError: when several would write them into one file.
    """
    named = [point.planned.config.run.prometheus for point in points if point.planned]
    files = [file for file in named if file and os.path.isabs(os.path.expanduser(file))]
    for file in sorted({file for file in files if files.count(file) > 1}):
        rule = f"would be written by {counted(files.count(file), 'point')} of the sweep"
        fix = "Give a relative path, which is one in each run directory."
        raise ConfigError([Fault("run.prometheus", file, rule, fix, ways=({"run.prometheus": "run.prom"},))])


def _section(composed: Composed) -> Any:
    """The section of a recipe that holds axes, its values as they are written; None: it has none."""

    def text(path: str, value: Any) -> Any:
        written = composed.sources[path].text if path in composed.sources else None
        return value if written is None or value is None else written

    return mapped(composed.values.get(SECTION), text, SECTION)


def starts_here(points: Sequence[Point]) -> bool:
    """Whether points start on this machine, one after the other.

    Raises:
        ConfigError: when they differ in that.
    """
    names = {point.plan.config.executor.name for point in points}
    if len(names) > 1:
        rule = "the points of a sweep are started in one way"
        raise ConfigError([Fault("executor.name", ",".join(sorted(names)), rule, "Choose one executor.")])
    return executor_of(points[0].plan).is_local


def _faults(plan: Plan, *, starts: bool) -> Sequence[Fault]:
    """Why a plan cannot be started from here, or why a scheduler cannot have it."""
    is_local, run = executor_of(plan).is_local, prepared(plan)
    if starts:
        return start_faults(run, is_here=is_local)
    return [*seen_faults(plan), *(() if is_local else executor_faults(run, is_here=False))]


def _faults_of(error: LauncherError, point: Point) -> tuple[Fault, ...]:
    return error.faults if isinstance(error, ConfigError) else (Fault(SECTION, point.label, str(error)),)


def _executor_word(recipe: str, point: Point) -> Sequence[str]:
    """The executor that a site asks for where none is chosen that has a site."""
    site = compose(recipe, point.overrides).values.get("site")
    if not isinstance(site, dict) or site.get("name") in (None, "none"):
        return ()
    words = with_executor(Request(recipe=recipe, overrides=point.overrides))
    return words.overrides[: len(words.overrides) - len(point.overrides)]


PointRun = tuple[Point, PreparedRun]
"""A point and its run, which is about to start."""


def new_sweep(planned: PlannedSweep, output: Output) -> Sweep:
    """Makes the directory of a sweep and says what it is.

    Raises:
        ConfigError: when it cannot be made.
    """
    sweep = make_sweep(planned)
    for note in planned.notes:
        output.say(f"note: {note}")
    if planned.refused:
        output.say("\n".join(refusals(planned.refused, text_width())) + "\n")
    num_points = len(planned.points)
    count = counted(num_points + len(planned.refused), "point")
    output.say(f"{num_points} of {count} to run = {planned.dims}, in {shown(sweep.path)}")
    return sweep


def create_runs(sweep: Sweep, origin: Origin, code: Path | None = None) -> list[PointRun]:
    """Every point with its run, all recorded before the first starts: a change of the recipe reaches none.

    ``code``: the directory that holds their frozen code; None: they run the code that is installed.
    """
    runs = []
    for point in sweep.points:
        config = point.plan.config
        with released(new_directory(config.run, config.name)) as directory:
            run = PreparedRun(plan=point.plan, directory=directory, code=code)
            run.record(replace(origin, overrides=point.overrides))
        runs.append((point, run))
    return runs


def reset_runs(
    points: Sequence[Point], given: Request, output: Output, code: Path | None = None
) -> list[PointRun]:
    """Points that were started before with their runs, which resume from their last checkpoint.

    Raises:
        JobError: when one is still going, or its frozen code is of a version that reads other plans.
    """
    runs = []
    for point in points:
        with released(hold(point.directory, output.say)) as directory:
            runs.append((point, _reset(point, directory, given, code)))
    return runs


def _reset(point: Point, directory: RunDirectory, given: Request, code: Path | None) -> PreparedRun:
    check_idle(directory)
    if directory.plan.read_text(encoding="utf-8") != point.plan.to_json():
        if code is not None:
            raise JobError(
                f"{shown(directory.path)} was planned by another version of trireme-launcher, which its "
                "frozen code belongs to: retry it with that version, or start the sweep again."
            )
        write_plan(directory, point.plan.to_json())
    saved = saved_steps(directory.path)
    resume = bool(saved) and saved[-1] < point.plan.config.train.num_steps
    if not point.is_waiting:
        fresh_folders(directory, *(START_FOLDERS if resume else (*SUBFOLDERS, CHECKPOINTS)))
    if given.accepts_changed_inputs:
        forget_inputs(directory)
    run = PreparedRun(plan=point.plan, directory=directory, code=code, resume=resume)
    run.record_script()
    return run
