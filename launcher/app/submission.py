"""A recipe on its way into a scheduler's queue: compose, plan, freeze, record, submit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from launcher.app.baseline_run import Baseline, settle_baseline, submit_baseline
from launcher.app.checks import executor_faults, input_faults, refuse
from launcher.app.launch import run_directory, summary
from launcher.app.lifecycle import PreparedRun, freeze_and_submit, origin_of
from launcher.app.output import TERMINAL, Output, shown
from launcher.app.prepared_run import Planned, make_plan
from launcher.app.request import Request
from launcher.base import registry
from launcher.base.errors import ConfigError, Fault, LauncherError
from launcher.base.secrets import check_text, secret_values
from launcher.base.units import counted
from launcher.config.compose import draft
from launcher.contract.job import JobHandle
from launcher.contract.plan import Plan
from launcher.runs.facts import Checkout
from launcher.runs.record import Origin
from launcher.runs.render import shell_text
from launcher.runs.store import RunDirectory, expected_path

DEFAULT_EXECUTOR = "slurm"
"""What submits a recipe that starts on this machine unless it is told otherwise."""


def submit(asked: Request, output: Output = TERMINAL) -> PreparedRun:
    """Hands a recipe to a scheduler, or with `dry_run` prints what would be submitted and makes nothing.

    Raises:
        LauncherError: when nothing was submitted.
    """
    given = with_executor(asked)
    planned = make_plan(given.recipe, given.overrides)
    plan, sources = planned.plan, planned.composed.sources
    given.check(plan.config)
    path = expected_path(plan.config.run, plan.config.name)
    run = PreparedRun(plan=plan, directory=RunDirectory(path), code=path, resume=given.resume)
    refuse(executor_faults(run, is_here=False), sources)
    if given.dry_run:
        _print_script(planned, run, output)
        return run
    refuse(input_faults(plan, is_here=False, is_resumed=given.resume), sources)
    origin = submitted_origin(given, plan.source_roots, plan.config.site.secrets)
    # A resumed run was planned with the copies of the user's modules.
    directory = run_directory(run.recorded_plan if given.resume else plan, given)
    run = replace(run, directory=directory, code=directory.path)
    try:
        handle, copied = freeze_and_submit(run, origin, given.untracked)
    except LauncherError:
        if given.resume:
            directory.write_status("failed")
        else:  # nothing is left of a run that never was
            shutil.rmtree(directory.path)
        raise
    trees = tree_notes(origin.checkouts, copied)
    for note in (*planned.composed.notes, *plan.notes, *handle.notes, *trees):
        output.say(f"note: {note}")
    _tell(run, handle, output)
    if given.wants_baseline and not given.resume:
        after = handle.id if plan.config.site.is_one_machine else ""

        def make(alone: Plan) -> Baseline:
            return submit_baseline(alone, origin, after=after, untracked=given.untracked)

        if sentence := settle_baseline(run, make).sentence:
            output.say(sentence)
    return run


def submitted_origin(given: Request, source_roots: Sequence[str], secrets: Sequence[str]) -> Origin:
    """Where plans come from that are submitted now.

    Raises:
        LauncherError: when no commit holds the code and one is asked for, or a variable of ``secrets`` that
            the ranks are given is not set.
    """
    origin = origin_of(given.recipe, given.overrides, source_roots)
    if given.require_clean:
        _check_clean(origin.checkouts)
    secret_values(os.environ, secrets)
    return origin


def _check_clean(trees: Sequence[Checkout]) -> None:
    """Refuses code that no commit holds."""
    for tree in trees:
        changed = ["changes to tracked files"] if tree.patch else []
        if changed + list(tree.untracked):
            listed = ", ".join([*changed, *tree.untracked][:5])
            raise LauncherError(f"--require-clean: {tree.root} has {listed}. Commit or remove them.")


def with_executor(given: Request) -> Request:
    """The request with an executor that submits: the one that the recipe or an override names, else Slurm."""
    of_executor = [word for word in given.overrides if word.lstrip("+~").startswith("executor")]
    named = next((word for word in of_executor if word.lstrip("+").startswith("executor=")), None)
    others = [word for word in given.overrides if word not in of_executor]
    chosen = draft(given.recipe, [*others, *([named] if named else [])]).values.get("executor")
    name = str(chosen.get("name")) if isinstance(chosen, Mapping) else ""
    # One that is not installed is refused by the planning.
    is_known = name in registry.plugins("launcher.executors")
    if not is_known or not registry.load("launcher.executors", name).is_local:
        return given
    if named:
        rule = "starts the ranks on this machine, at once, and submits nothing"
        fix = f"Leave it out, set executor={DEFAULT_EXECUTOR}, or use trireme run."
        raise ConfigError([Fault("executor.name", name, rule, fix, f"override {named}")])
    return replace(given, overrides=(f"executor={DEFAULT_EXECUTOR}", *given.overrides))


def _print_script(planned: Planned, run: PreparedRun, output: Output) -> None:
    """Prints what would be submitted, and nothing else on the standard output."""
    text = shell_text(run.script)
    check_text(text, "the job script", secret_values(os.environ, ()))
    notes = [*planned.composed.notes, *planned.plan.notes]
    if planned.plan.config.run.dir is None:
        notes.append("The run directory is named by the time; give run.dir to know the bytes beforehand.")
    for note in notes:
        output.warn(f"note: {note}")
    output.stream.write(text)


def tree_notes(trees: Sequence[Checkout], copied: Sequence[str]) -> Iterator[str]:
    """What the code that was copied has beyond its commits."""
    for tree in trees:
        if tree.patch:
            commit = (tree.commit or "")[:12]
            yield f"{tree.root} differs from commit {commit}; the job runs it as it is. The patch is kept."
    if copied:
        listed = ", ".join(sorted(copied)[:5]) + (", ..." if len(copied) > 5 else "")
        yield f"Copied although git does not track them: {listed}."


def _tell(run: PreparedRun, handle: JobHandle, output: Output) -> None:
    path = shown(run.directory.path)
    output.say(summary(run.plan))
    output.say(f"submitted as job {handle.id} on {counted(run.plan.num_nodes, 'node')}")
    output.say(f"run directory: {path}")
    output.say(
        f"  trireme status {path}\n  trireme logs -f {path}\n  trireme wait {path}\n  trireme cancel {path}"
    )
