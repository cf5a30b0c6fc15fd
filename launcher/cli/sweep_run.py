"""``trireme sweep run``: every point that can run, here one after the other, or on a scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.cli.checks import check_baseline_flag, input_faults
from launcher.cli.ending import say, shown, text_width
from launcher.cli.launch import local_faults
from launcher.cli.main import EXIT_FAULT
from launcher.cli.sweep_local import Attempt, run_attempts
from launcher.cli.sweep_plan import lines
from launcher.cli.sweep_points import Points, placed, plan_points, start_faults
from launcher.cli.words import Words
from launcher.errors import Fault, LauncherError
from launcher.jobs.facts import checkouts, environment_facts
from launcher.jobs.record import Origin, write_job
from launcher.jobs.render import executor_of, render
from launcher.jobs.store import new_directory
from launcher.plan.model import Plan
from launcher.sweep.store import NewSweep, Sweep, make_sweep
from launcher.sweep.tables import refusals
from launcher.units import counted

_OF_SCHEDULERS = ("at-once", "require-clean", "untracked")


def act(given: Words) -> int:
    """Runs the points; returns the exit code.

    Raises:
        LauncherError: when none could be started.
    """
    points = plan_points(given, _faults)
    if not points.planned:
        print("\n".join(lines(points)))
        return EXIT_FAULT
    is_local = points.is_local
    for plan in points.plans:
        check_baseline_flag(plan, given)
    if not is_local:
        from launcher.cli.sweep_submit import submit_points

        return submit_points(points, given)
    for flag in _OF_SCHEDULERS:
        if given.flags[flag]:
            raise LauncherError(
                f"--{flag} has no effect on a sweep on this machine, whose points run one after the other."
            )
    if given.flags["dry-run"]:
        print("\n".join(lines(points)))
        return 0
    return _run_here(points, given)


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


def _faults(plan: Plan) -> Iterable[Fault]:
    is_local = executor_of(plan).is_local
    here = local_faults(plan) if is_local else start_faults(plan)
    return [*here, *input_faults(plan, is_here=is_local)]


def _run_here(points: Points, given: Words) -> int:
    """Records every point before the first starts, so that a change of the recipe reaches none."""
    sweep = new_sweep(points)
    facts, trees = environment_facts(), checkouts()
    attempts = []
    for item, stored in zip(points.planned, sweep.points, strict=True):
        plan = placed(item.plan, stored.directory.path)
        directory = new_directory(plan.config.run, plan.config.name)
        origin = Origin(recipe=points.recipe, overrides=item.point.overrides, facts=facts, checkouts=trees)
        script = render(plan, directory.path)
        write_job(directory, plan, script, origin)
        attempts.append(
            Attempt(label=stored.label, directory=directory, plan=plan, script=script, origin=origin)
        )
    return run_attempts(sweep, attempts, wants_baseline=not given.flags["no-baseline"])
