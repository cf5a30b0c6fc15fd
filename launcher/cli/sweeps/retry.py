"""``trireme sweep retry``: the points of a sweep once more that failed, or did not start."""

from __future__ import annotations

from argparse import Namespace

from launcher.app.ending import say, shown
from launcher.app.sweep.local import Attempt, run_attempts
from launcher.app.sweep.results import Outcome, read_outcomes
from launcher.app.sweep.store import find_sweep, ready_again
from launcher.base.errors import LauncherError
from launcher.base.units import counted
from launcher.cli.arguments import request
from launcher.runs.facts import checkouts, environment_facts
from launcher.runs.record import Origin
from launcher.runs.render import executor_of, render, shell_text

_TO_RETRY = ("failed", "cancelled", "not started")


def act(given: Namespace) -> int:
    """Runs those points again; returns the exit code.

    Raises:
        LauncherError: when a point is still going, or none can be started.
    """
    asked = request(given)
    sweep = find_sweep(given.sweep)
    found = [outcome for outcome in read_outcomes(sweep) if outcome.standing in _TO_RETRY]
    if not found:
        say(f"{shown(sweep.path)}: no point has failed or is left to start")
        return 0
    say(f"{counted(len(found), 'point')} of {len(sweep.points)} again, in {shown(sweep.path)}")
    if not executor_of(found[0].plan).is_local:
        from launcher.app.sweep.submit import resubmit

        return resubmit(sweep, found, asked)
    if asked.at_once is not None:
        raise LauncherError("--at-once has no effect on a sweep on this machine: its points run one by one.")
    facts, trees = environment_facts(), checkouts()
    attempts = []
    for outcome in found:
        origin = Origin(recipe=sweep.recipe, overrides=outcome.overrides, facts=facts, checkouts=trees)
        attempts.append(_attempt(outcome, origin))
    return run_attempts(sweep, attempts, wants_baseline=asked.wants_baseline)


def _attempt(outcome: Outcome, origin: Origin) -> Attempt:
    directory, plan = outcome.directory, outcome.plan
    resumes = ready_again(directory, plan.config.train.num_steps)
    script = render(plan, directory.path, resume=resumes)
    directory.write("job.sh", shell_text(script))
    directory.write_status("prepared")
    return Attempt(label=outcome.label, directory=directory, plan=plan, script=script, origin=origin)
