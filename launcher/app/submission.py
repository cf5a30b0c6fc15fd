"""A recipe on its way into a scheduler's queue: compose, plan, freeze, record, submit."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.app.checks import check_baseline_flag, check_directory_flags, input_faults
from launcher.app.ending import say, shown
from launcher.app.frozen_job import Material, submit_plan
from launcher.app.launch import run_directory, summary
from launcher.app.prepared_run import Planned, make_plan
from launcher.app.request import Request
from launcher.app.submitted_baseline import settle_baseline
from launcher.base import registry
from launcher.base.errors import ConfigError, Fault, LauncherError, PlanError
from launcher.base.secrets import check_text, secret_values
from launcher.base.units import counted
from launcher.config.compose import draft
from launcher.contract.config import SUBMITTING_EXECUTOR
from launcher.contract.executor import Executor
from launcher.contract.job import JobHandle, JobScript
from launcher.contract.plan import Plan
from launcher.plan.rules.checks import with_sources
from launcher.runs.facts import Checkout, checkouts, environment_facts
from launcher.runs.freeze import frozen_plan
from launcher.runs.record import Origin
from launcher.runs.render import render, shell_text
from launcher.runs.store import RunDirectory, expected_path


def submit(asked: Request) -> int:
    """Submits a recipe; returns the exit code.

    Raises:
        LauncherError: when nothing was submitted.
    """
    given = with_executor(asked)
    planned = make_plan(given.recipe, given.overrides)
    check_directory_flags(planned.plan, given)
    check_baseline_flag(planned.plan, given)
    run = planned.plan.config.run
    script = _render(planned, expected_path(run, planned.plan.config.name), given)  # refuses early
    if given.dry_run:
        return _print_script(planned, script)
    if faults := input_faults(planned.plan, is_here=False, is_resumed=given.resume):
        raise ConfigError(with_sources(faults, planned.composed.sources))
    material = gather(planned.plan.source_roots, planned.plan.config.site.secrets, given)
    directory, resume = _directory(planned.plan, given), given.resume
    try:
        handle, copied = submit_plan(directory, planned.plan, material, resume=resume)
    except LauncherError:
        if resume:
            directory.write_status("failed")
        else:  # nothing is left of a run that never was
            shutil.rmtree(directory.path)
        raise
    trees = tree_notes(material.origin.checkouts, copied)
    for note in (*planned.composed.notes, *planned.plan.notes, *handle.notes, *trees):
        say(f"note: {note}")
    _tell(directory, planned.plan, handle)
    if given.wants_baseline and not resume:
        after = handle.id if planned.plan.config.site.is_one_machine else ""
        _tell_baseline(directory, planned.plan, material, after)
    return 0


def gather(source_roots: Sequence[str], secrets: Sequence[str], given: Request) -> Material:
    """The state of the code, and the secrets that may not get into the run directory.

    ``secrets``: names of variables that the ranks are given.
    """
    trees = checkouts(source_roots)
    if given.require_clean:
        _check_clean(trees)
    facts = environment_facts()
    origin = Origin(recipe=given.recipe, overrides=given.overrides, facts=facts, checkouts=trees)
    values = secret_values(os.environ, secrets)
    return Material(origin=origin, patterns=given.untracked, secrets=values)


def _check_clean(trees: Sequence[Checkout]) -> None:
    """Refuses code that no commit holds."""
    for tree in trees:
        changed = ["changes to tracked files"] if tree.patch else []
        if changed + list(tree.untracked):
            listed = ", ".join([*changed, *tree.untracked][:5])
            raise LauncherError(f"--require-clean: {tree.root} has {listed}. Commit or remove them.")


def _tell_baseline(directory: RunDirectory, plan: Plan, material: Material, after: str) -> None:
    def start(base: RunDirectory, alone: Plan) -> JobHandle:
        return submit_plan(base, alone, material, after=after)[0]

    if sentence := settle_baseline(directory, plan, start):
        say(sentence)


def with_executor(given: Request) -> Request:
    """The request with an executor that submits: what recipe or override names, else the default."""
    of_executor = [word for word in given.overrides if word.lstrip("+~").startswith("executor")]
    named = next((word for word in of_executor if word.lstrip("+").startswith("executor=")), None)
    others = [word for word in given.overrides if word not in of_executor]
    chosen = draft(given.recipe, [*others, *([named] if named else [])]).values.get("executor")
    name = str(chosen.get("name")) if isinstance(chosen, Mapping) else ""
    # One that is not installed is refused by the planning.
    is_known = name in registry.plugins(Executor.entry_group)
    if not is_known or not registry.load(Executor, name).is_local:
        return given
    if named:
        rule = "starts the ranks on this machine, at once, and submits nothing"
        fix = f"Leave it out, set executor={SUBMITTING_EXECUTOR}, or use trireme run."
        raise ConfigError([Fault("executor.name", name, rule, fix, f"override {named}")])
    return replace(given, overrides=(f"executor={SUBMITTING_EXECUTOR}", *given.overrides))


def _render(planned: Planned, path: Path, given: Request) -> JobScript:
    plan = frozen_plan(planned.plan, path)
    try:
        return render(plan, path, resume=given.resume)
    except PlanError as error:
        raise PlanError(with_sources(error.faults, planned.composed.sources)) from None


def _print_script(planned: Planned, script: JobScript) -> int:
    """Prints what would be submitted, and nothing else on the standard output."""
    text = shell_text(script)
    check_text(text, "the job script", secret_values(os.environ, ()))
    notes = [*planned.composed.notes, *planned.plan.notes]
    if planned.plan.config.run.dir is None:
        notes.append("The run directory is named by the time; give run.dir to know the bytes beforehand.")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(text, end="")
    return 0


def _directory(plan: Plan, given: Request) -> RunDirectory:
    """The run directory. A resumed run was planned with the copies of the user's modules."""
    path = expected_path(plan.config.run, plan.config.name)
    return run_directory(frozen_plan(plan, path) if given.resume else plan, given)


def tree_notes(trees: Sequence[Checkout], copied: Sequence[str]) -> Iterator[str]:
    """What the code that was copied has beyond its commits."""
    for tree in trees:
        if tree.patch:
            commit = (tree.commit or "")[:12]
            yield f"{tree.root} differs from commit {commit}; the job runs it as it is. The patch is kept."
    if copied:
        listed = ", ".join(sorted(copied)[:5]) + (", ..." if len(copied) > 5 else "")
        yield f"Copied although git does not track them: {listed}."


def _tell(directory: RunDirectory, plan: Plan, handle: JobHandle) -> None:
    path = shown(directory.path)
    say(summary(plan))
    say(f"submitted as job {handle.id} on {counted(plan.num_nodes, 'node')}")
    say(f"run directory: {path}")
    say(f"  trireme status {path}\n  trireme logs -f {path}\n  trireme wait {path}\n  trireme cancel {path}")
