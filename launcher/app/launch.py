"""A recipe on its way to a finished run: compose, plan, record, baseline, ranks, report."""

from __future__ import annotations

from launcher.app.baseline_run import Baseline, settle_baseline, train_baseline
from launcher.app.checks import allocation_notes, refuse, start_faults
from launcher.app.lifecycle import EndedRun, PreparedRun, origin_of, tell_end, train
from launcher.app.output import TERMINAL, Output, shown, text_width
from launcher.app.prepared_run import make_plan
from launcher.app.request import Request
from launcher.base.units import counted
from launcher.contract.actions import from_text
from launcher.contract.plan import Plan
from launcher.runs.resume import resumed_directory
from launcher.runs.store import RunDirectory, expected_path, new_directory
from launcher.runs.watch import stop_requests
from launcher.schedule.drawing.grid import draw


def launch(given: Request, output: Output = TERMINAL) -> EndedRun:
    """Runs a recipe on this machine, to its end.

    Raises:
        LauncherError: when nothing could be started.
    """
    planned = make_plan(given.recipe, given.overrides)
    plan = planned.plan
    given.check(plan.config)
    expected = RunDirectory(expected_path(plan.config.run, plan.config.name))
    run = PreparedRun(plan=plan, directory=expected, resume=given.resume)
    refuse(start_faults(run, is_here=True), planned.composed.sources)
    directory = run_directory(plan, given)
    origin = origin_of(given.recipe, given.overrides)
    with stop_requests() as stop:

        def make(alone: Plan) -> Baseline:
            return train_baseline(alone, origin, stop, output)

        run = PreparedRun(plan=plan, directory=directory, resume=given.resume)
        run.record(origin)
        for note in (*planned.composed.notes, *plan.notes, *allocation_notes(plan, directory)):
            output.say(f"note: {note}")
        drawn = _drawn_schedule(plan, color=output.stream.isatty())
        output.say(f"{summary(plan)}\n{drawn}run directory: {shown(directory.path)}")
        try:
            if given.wants_baseline and (sentence := settle_baseline(run, make).sentence):
                output.say(sentence)
            state = train(run, stop, output)
        except BaseException:
            directory.write_status("failed")
            raise
    ended = EndedRun(directory=directory, state=state)
    tell_end(ended, output)
    return ended


def run_directory(plan: Plan, given: Request) -> RunDirectory:
    """The directory of the run: a new one, or with --resume that of an interrupted run."""
    if given.resume:
        return resumed_directory(plan.config.run, plan.to_json())
    return new_directory(plan.config.run, plan.config.name, overwrite=given.overwrite)


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
    lists = [from_text(actions) for actions in plan.schedule.actions]
    return draw(lists, plan.pipeline, width=text_width(), color=color).rstrip() + "\n"
