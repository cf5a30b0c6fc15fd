"""``trireme sweep run``: every point that can run, here one after the other, or on a scheduler."""

from __future__ import annotations

from argparse import Namespace

from launcher.app.checks import check_baseline_flag
from launcher.app.sweep.local import run_points
from launcher.app.sweep.points import plan_points
from launcher.app.sweep.submit import submit_points
from launcher.base.errors import LauncherError
from launcher.cli.arguments import request
from launcher.cli.main import EXIT_FAULT
from launcher.cli.sweeps.plan import lines

_OF_SCHEDULERS = ("at-once", "require-clean", "untracked")


def act(given: Namespace) -> int:
    """Runs the points; returns the exit code.

    Raises:
        LauncherError: when none could be started.
    """
    asked = request(given)
    points = plan_points(asked, starts=True)
    if not points.planned:
        print("\n".join(lines(points)))
        return EXIT_FAULT
    for plan in points.plans:
        check_baseline_flag(plan, asked)
    if not points.is_local:
        return submit_points(points, asked)
    for flag in _OF_SCHEDULERS:
        if getattr(given, flag.replace("-", "_")):
            raise LauncherError(
                f"--{flag} has no effect on a sweep on this machine, whose points run one after the other."
            )
    if asked.dry_run:
        print("\n".join(lines(points)))
        return 0
    return run_points(points, wants_baseline=asked.wants_baseline)
