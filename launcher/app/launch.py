"""A recipe on its way to a run: on this machine to its end, or into the queue of a scheduler."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from launcher.app.baseline import ensure_baseline, submit_baseline, train_baseline
from launcher.app.data import prepare_data
from launcher.app.lifecycle import (
    EndedRun,
    PreparedRun,
    failed_unless_ended,
    freeze_and_submit,
    origin_of,
    prepared,
    removed_unless_begun,
    report_end,
    train,
)
from launcher.app.output import TERMINAL, Output, shown, takes_color, text_width
from launcher.app.planning import Planned, make_plan
from launcher.app.preflight import (
    allocation_notes,
    executor_faults,
    refuse,
    seen_faults,
    source_notes,
    start_faults,
)
from launcher.app.request import Request
from launcher.base import registry
from launcher.base.errors import ConfigError, Fault, LauncherError
from launcher.base.lock import LostLockError
from launcher.base.secrets import check_text, secret_values
from launcher.base.units import counted
from launcher.config.compose import compose
from launcher.contract.config import SUBMITTING_EXECUTOR
from launcher.contract.executor import Executor
from launcher.contract.inputs.record import ACCEPT, UNKNOWN, read_inputs, refusal
from launcher.contract.job import JobHandle
from launcher.contract.plan import Plan
from launcher.runs.facts import Checkout
from launcher.runs.record import Origin
from launcher.runs.render import executor_of, shell_text
from launcher.runs.resume import (
    began_with,
    changed_inputs,
    forget_inputs,
    put_back,
    resumed_directory,
    set_aside_newer,
)
from launcher.runs.store import RunDirectory, absolute, new_directory, released
from launcher.runs.watch import stop_signals
from launcher.schedule.drawing.grid import draw


def launch(asked: Request, output: Output = TERMINAL) -> EndedRun:
    """Runs a recipe on this machine, to its end.

    Raises:
        LauncherError: when nothing could be started.
    """
    output = replace(output, goes_on=True)
    given, planned = _planned(asked)
    plan = planned.plan
    given.check(plan.config)
    refuse(start_faults(prepared(plan, resume=given.resume), is_here=True), planned.composed.sources)
    prepare_data(plan, output, planned.composed.sources)
    directory, resumed = run_directory(plan, given, output)
    with stop_signals() as stop, failed_unless_ended(directory):
        run = prepared(plan, directory, resume=given.resume)
        with removed_unless_begun(directory.path, is_new=not given.resume):
            origin = origin_of(given.recipe, given.overrides)
            run.record(origin)
        for note in (
            *planned.composed.notes,
            *plan.notes,
            *allocation_notes(plan, directory),
            *resumed,
        ):
            output.say(f"note: {note}")
        drawn = _drawn_schedule(plan, color=takes_color(output.stream))
        output.say(f"{summary(plan)}\n{drawn}run directory: {shown(directory.path)}")
        if given.wants_baseline:
            found = ensure_baseline(run, lambda plan: train_baseline(plan, origin, stop, output))
            if found.message:
                output.say(found.message)
        if stop.signal is None:
            _set_aside_newer(directory, given, output)
        state = train(run, stop, output)
    ended = EndedRun(directory=directory, state=state)
    report_end(ended, output)
    return ended


def submit(asked: Request, output: Output = TERMINAL) -> PreparedRun:
    """Hands a recipe to a scheduler, or with `dry_run` prints what would be submitted and makes nothing.

    Raises:
        LauncherError: when nothing was submitted.
    """
    given, planned = _planned(with_executor(asked))
    plan, sources = planned.plan, planned.composed.sources
    given.check(plan.config)
    run = prepared(plan, resume=given.resume)
    if given.dry_run:
        seen = [] if given.resume else seen_faults(plan)
        refuse([*executor_faults(run, is_here=False), *seen], sources)
        _print_script(planned, run, output)
        return run
    refuse(start_faults(run, is_here=False), sources)
    prepare_data(plan, output, sources, is_here=False)
    origin = submitted_origin(given, plan.source_roots, plan.config.site.secrets)
    directory, resumed = run_directory(plan, given, output)
    run = prepared(plan, directory, resume=given.resume)
    with (
        released(directory),
        removed_unless_begun(directory.path, is_new=not given.resume),
        _newer_aside(directory, given, output),
    ):
        handle, copied = freeze_and_submit(run, origin, given.untracked)
    trees = tree_notes(origin.checkouts, copied)
    for note in (
        *planned.composed.notes,
        *plan.notes,
        *resumed,
        *handle.notes,
        *trees,
    ):
        output.say(f"note: {note}")
    _report_submission(run, handle, output)
    if given.wants_baseline and not given.resume:
        after = handle.id if plan.config.site.is_one_machine else ""
        found = ensure_baseline(
            run, lambda plan: submit_baseline(plan, origin, after=after, untracked=given.untracked)
        )
        if found.message:
            output.say(found.message)
    return run


def _planned(given: Request) -> tuple[Request, Planned]:
    """The plan, of a run that is resumed with what it began with, which needs not be told again; and the
    request for it."""
    planned = make_plan(given.recipe, given.overrides, allow=given.allow)
    train = planned.plan.config.train
    began = began_with(planned.plan.config.run) if given.resume and train.init_from is None else ()
    if not began:
        return given, planned
    given = replace(given, overrides=(*given.overrides, *began))
    return given, make_plan(given.recipe, given.overrides, allow=given.allow)


def run_directory(plan: Plan, given: Request, output: Output) -> tuple[RunDirectory, tuple[str, ...]]:
    """The directory of the run, with its lock: a new one, or with --resume that of an interrupted run. Then
    what is to be known of what is resumed."""
    run, step = plan.config.run, given.resume_step
    if not given.resume:
        return new_directory(run, plan.config.name, overwrite=given.overwrite, say=output.say), ()
    faults = []
    if not given.accepts_changed_inputs and (changed := changed_inputs(plan, absolute(run.dir or ""))):
        verb = "run" if executor_of(plan).is_local else "submit"
        resume = "--resume" if step is None else f"--resume={step}"
        command = shlex.join(("trireme", verb, given.recipe, *given.overrides, resume, ACCEPT))
        faults = [refusal(run.dir or "", changed, command)]
    directory = resumed_directory(run, plan.to_json(), faults, step=step, say=output.say)
    with released(directory, on_error_alone=True):
        if given.accepts_changed_inputs:
            forget_inputs(directory)
            return directory, ()
        is_unknown = read_inputs(directory.path) is None
        return directory, ((f"{directory.path.name}: {UNKNOWN}.",) if is_unknown else ())


def _set_aside_newer(
    directory: RunDirectory, given: Request, output: Output
) -> tuple[list[int], Path | None]:
    """Sets the checkpoints after the step that is asked for aside, and says so at once."""
    newer, aside = set_aside_newer(directory, given.resume_step) if given.resume_step else ([], None)
    if aside is not None:
        listed = f"{'s' if len(newer) > 1 else ''} after step {', '.join(map(str, newer))}"
        output.say(
            f"note: The newer checkpoint{listed} went to {shown(aside)}; their steps are made again, and "
            f"whatever goes on from the newest checkpoint goes on from this line."
        )
    return newer, aside


@contextmanager
def _newer_aside(directory: RunDirectory, given: Request, output: Output) -> Iterator[None]:
    """Has the newer checkpoints aside for what is submitted, and back in place where that is refused."""
    newer, aside = _set_aside_newer(directory, given, output)
    try:
        yield
    except LostLockError:
        raise
    except LauncherError:  # not an OSError: one may come from what is written down after it was submitted
        if aside is not None:
            put_back(directory, newer, aside)
            output.say("note: Nothing was submitted, so they are back in their place.")
        raise


def summary(plan: Plan) -> str:
    """Name, ranks, schedule and batch in one line."""
    parallel, batch = plan.config.parallel, plan.batch
    chunks = f", {parallel.num_chunks} chunks per rank" if parallel.num_chunks > 1 else ""
    layout = f"pp={parallel.pp} dp={parallel.dp} tp={parallel.tp}"
    samples, parts = counted(batch.global_size, "sample"), counted(batch.num_microbatches, "microbatch")
    return (
        f"{plan.config.name}: {counted(plan.world_size, 'rank')} ({layout}), "
        f"schedule {plan.schedule.name}{chunks}, {samples} a step in {parts} of {batch.micro_size}"
    )


def _drawn_schedule(plan: Plan, *, color: bool) -> str:
    """The schedule as `trireme plan` draws it; nothing where there is no pipeline."""
    if plan.mesh.pp == 1:
        return ""
    return draw(plan.lists, plan.pipeline, width=text_width(), color=color).rstrip() + "\n"


def submitted_origin(given: Request, source_roots: Sequence[str], secrets: Sequence[str]) -> Origin:
    """Where plans come from that are submitted now.

    Raises:
        LauncherError: when no commit holds the code and one is asked for, or a variable of ``secrets`` that
            the ranks are given is not set.
    """
    origin = origin_of(given.recipe, given.overrides, source_roots, secrets)
    for tree in origin.checkouts if given.require_clean else ():
        changed = ["changes to tracked files"] if tree.patch else []
        changed += [f"{name} (not compared: see git diff)" for name in tree.uncompared]
        if changed + list(tree.untracked):
            listed = ", ".join([*changed, *tree.untracked][:5])
            raise LauncherError(f"--require-clean: {tree.root} has {listed}. Commit or remove them.")
    return origin


def with_executor(given: Request) -> Request:
    """The request with an executor that submits: what recipe or override names, else the default."""
    of_executor = [word for word in given.overrides if word.lstrip("+~").startswith("executor")]
    named = next((word for word in of_executor if word.lstrip("+").startswith("executor=")), None)
    others = [word for word in given.overrides if word not in of_executor]
    composed = compose(given.recipe, [*others, *([named] if named else [])])
    if composed.faults:  # such as one that there is not: the planning tells them all
        return given
    chosen = composed.values.get("executor")
    name = str(chosen.get("name")) if isinstance(chosen, Mapping) else ""
    # One that is not installed is refused by the planning.
    is_known = name in registry.plugins(Executor.entry_group)
    if not is_known or not registry.load(Executor, name).is_local:
        return given
    if named:
        rule = "starts the ranks on this machine, at once, and submits nothing"
        fix = f"Leave it out, set executor={SUBMITTING_EXECUTOR}, or use trireme run."
        ways = ({"executor": SUBMITTING_EXECUTOR},)
        raise ConfigError([Fault("executor.name", name, rule, fix, f"override {named}", ways=ways)])
    return replace(given, overrides=(f"executor={SUBMITTING_EXECUTOR}", *given.overrides))


def _print_script(planned: Planned, run: PreparedRun, output: Output) -> None:
    """Prints what would be submitted, and nothing else on the standard output."""
    text = shell_text(run.script)
    check_text(text, "the job script", secret_values(os.environ, ()))
    notes = [
        *planned.composed.notes,
        *planned.plan.notes,
        *([] if run.resume else source_notes(planned.plan)),
    ]
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
        if tree.uncompared:
            names = ", ".join(tree.uncompared[:5]) + (", ..." if len(tree.uncompared) > 5 else "")
            yield f"{tree.root}: git could not compare, and the patch leaves out: {names}."
    if copied:
        listed = ", ".join(sorted(copied)[:5]) + (", ..." if len(copied) > 5 else "")
        yield f"Copied although git does not track them: {listed}."


def _report_submission(run: PreparedRun, handle: JobHandle, output: Output) -> None:
    path = shlex.quote(shown(run.directory.path))
    output.say(summary(run.plan))
    output.say(f"submitted as job {handle.id} on {counted(run.plan.num_nodes, 'node')}")
    output.say(f"run directory: {shown(run.directory.path)}")
    output.say(
        f"  trireme status {path}\n  trireme logs -f {path}\n  trireme wait {path}\n  trireme cancel {path}"
    )
