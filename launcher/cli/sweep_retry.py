"""``trireme sweep retry``: the points of a sweep once more that failed, or did not start."""

from __future__ import annotations

from launcher.cli.ending import say, shown
from launcher.cli.sweep_local import Attempt, run_attempts
from launcher.cli.sweep_status import find_sweep, read_outcomes
from launcher.cli.words import Words
from launcher.errors import LauncherError
from launcher.jobs.facts import checkouts, environment_facts
from launcher.jobs.record import Origin
from launcher.jobs.render import executor_of, render, shell_text
from launcher.sweep.results import Outcome
from launcher.sweep.store import ready_again
from launcher.units import counted

_TO_RETRY = ("failed", "cancelled", "not started")


def act(given: Words) -> int:
    """Runs those points again; returns the exit code.

    Raises:
        LauncherError: when a point is still going, or none can be started.
    """
    sweep = find_sweep(given)
    found = [outcome for outcome in read_outcomes(sweep) if outcome.standing in _TO_RETRY]
    if not found:
        say(f"{shown(sweep.path)}: no point has failed or is left to start")
        return 0
    say(f"{counted(len(found), 'point')} of {len(sweep.points)} again, in {shown(sweep.path)}")
    if not executor_of(found[0].plan).is_local:
        from launcher.cli.sweep_submit import resubmit

        return resubmit(sweep, found, given)
    if given.flags["at-once"]:
        raise LauncherError("--at-once has no effect on a sweep on this machine: its points run one by one.")
    facts, trees = environment_facts(), checkouts()
    attempts = []
    for outcome in found:
        origin = Origin(recipe=sweep.recipe, overrides=outcome.overrides, facts=facts, checkouts=trees)
        attempts.append(_attempt(outcome, origin))
    return run_attempts(sweep, attempts, wants_baseline=not given.flags["no-baseline"])


def _attempt(outcome: Outcome, origin: Origin) -> Attempt:
    directory, plan = outcome.directory, outcome.plan
    resumes = ready_again(directory, plan.config.train.num_steps)
    script = render(plan, directory.path, resume=resumes)
    directory.write("job.sh", shell_text(script))
    directory.write_status("prepared")
    return Attempt(label=outcome.label, directory=directory, plan=plan, script=script, origin=origin)
