"""A recipe on its way to a finished run: compose, plan, record, baseline, ranks, report."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from launcher.cli.planning import make_plan
from launcher.cli.progress import Progress
from launcher.cli.words import Words
from launcher.errors import ConfigError, Fault, JobError, LauncherError
from launcher.jobs.baseline import find_baseline, named_baseline, one_device
from launcher.jobs.devices import device_faults
from launcher.jobs.facts import checkouts, environment_facts
from launcher.jobs.failure import failure_text
from launcher.jobs.fingerprint import fingerprint
from launcher.jobs.record import Origin, write_baseline, write_job
from launcher.jobs.render import executor_of, render
from launcher.jobs.script import JobScript, JobState
from launcher.jobs.store import RunDirectory, absolute, new_directory, resumed_directory
from launcher.jobs.watch import StopRequest, follow, stop_requests
from launcher.plan.build import build
from launcher.plan.describe import describer
from launcher.plan.model import Plan
from launcher.report.tables import speedup_text
from launcher.schedule.actions import PipelineShape, from_text
from launcher.schedule.grid import draw
from launcher.topology.mesh import Coordinates

_MAX_WIDTH = 100


def launch(given: Words) -> int:
    """Runs a recipe from the words of the command line; returns the exit code.

    Raises:
        LauncherError: when nothing could be started.
    """
    planned = make_plan(given.recipe, given.overrides)
    plan = planned.plan
    _check_startable(plan, given)
    directory = _directory(plan, given)
    origin = Origin(
        recipe=given.recipe,
        overrides=given.overrides,
        facts=environment_facts(),
        checkouts=checkouts(),
    )
    with stop_requests() as stop:
        script = render(plan, directory.path, resume=bool(given.flags["resume"]))
        write_job(directory, plan, script, origin)
        for note in planned.composed.notes + plan.notes:
            _say(f"note: {note}")
        _say(f"{_summary(plan)}\n{_drawn_schedule(plan)}run directory: {_shown(directory.path)}")
        try:
            if not given.flags["no-baseline"]:
                _settle_baseline(directory, plan, origin, stop)
            state = _train(directory, plan, script, stop)
        except BaseException:
            directory.write_status("failed")
            raise
    return _finish(directory, state)


def reporting_rank(plan: Plan) -> int:
    """The rank whose records hold the loss and stand for the run."""
    return plan.mesh.rank(Coordinates(pp=plan.stages[-1].pp_rank, dp=0, tp=0))


def _check_startable(plan: Plan, given: Words) -> None:
    """Refuses before anything is made."""
    if not executor_of(plan).is_local:
        name = plan.config.executor.name
        fix = "Set executor=torchrun."
        raise ConfigError([Fault("executor.name", name, "does not start ranks on this machine", fix)])
    for flag in ("resume", "overwrite"):
        if given.flags[flag] and plan.config.run.dir is None:
            raise LauncherError(f"--{flag} needs the directory it is about. Give run.dir=DIRECTORY.")
    render(plan, absolute(plan.config.run.root))
    if faults := device_faults(plan, os.environ):
        raise ConfigError(faults)


def _directory(plan: Plan, given: Words) -> RunDirectory:
    if given.flags["resume"]:
        return resumed_directory(plan.config.run, plan.to_json())
    return new_directory(plan.config.run, plan.config.name, overwrite=bool(given.flags["overwrite"]))


def _settle_baseline(directory: RunDirectory, plan: Plan, origin: Origin, stop: StopRequest) -> None:
    """Finds or makes the run on one device that this run is measured against."""
    setting = plan.config.report.baseline
    if setting == "none" or plan.world_size == 1:
        return
    if setting != "auto":
        write_baseline(directory, named_baseline(setting))
        return
    found = find_baseline(absolute(plan.config.run.root), fingerprint(plan, origin.facts))
    if found is not None:
        _say(f"baseline: {_shown(found)}, an earlier run of the same training on one device")
    else:
        found = _make_baseline(plan, origin, stop)
    if found is not None:
        write_baseline(directory, found)


def _make_baseline(plan: Plan, origin: Origin, stop: StopRequest) -> Path | None:
    """Trains on one device; None where that cannot be."""
    config = one_device(plan)
    try:
        describe = describer(config.data, plan.source_roots)
        alone = build(config, describe=describe, source_roots=plan.source_roots)
    except ConfigError as error:
        _say(f"no baseline: this training does not run on one device:\n{error}")
        return None
    directory = new_directory(config.run, config.name)
    script = render(alone, directory.path)
    write_job(directory, alone, script, origin)
    _say(f"baseline: the same training on one device, in {_shown(directory.path)}")
    state = _train(directory, alone, script, stop)
    if state.phase == "failed":
        raise JobError(
            f"the baseline failed; --no-baseline runs without it\n{failure_text(directory.path, state)}"
        )
    return directory.path if state.phase == "succeeded" else None


def _train(directory: RunDirectory, plan: Plan, script: JobScript, stop: StopRequest) -> JobState:
    """Starts the ranks and follows them to their end, whatever it is."""
    if stop.signal is not None:
        return JobState(phase="cancelled", exit_code=stop.exit_code, reason=stop.signal.name)
    _say(f"training on {plan.world_size} rank{'s' if plan.world_size > 1 else ''}")
    progress = Progress(directory.records(reporting_rank(plan)), plan.config.train.num_steps, sys.stdout)
    directory.write_status("running")
    state = follow(executor_of(plan), script, stop, progress.update)
    progress.close()
    assert state.phase in ("succeeded", "failed", "cancelled"), f"a job that is {state.phase} was left"
    directory.write_status(state.phase, state.exit_code)
    return state


def _finish(directory: RunDirectory, state: JobState) -> int:
    """Says how it ended; returns the exit code."""
    if state.phase == "cancelled":
        directory.write_status("cancelled", state.exit_code)
        print(
            f"stopped by {state.reason}: all ranks have ended. Run directory: {_shown(directory.path)}",
            file=sys.stderr,
        )
        return state.exit_code or 1
    if state.phase == "failed":
        print(failure_text(directory.path, state), file=sys.stderr)
        return 1
    try:
        _say("\n" + speedup_text([directory.path], None, width=_width()).rstrip())
    except LauncherError as error:  # the training succeeded; only its measure is missing
        _say(f"no speedup: {error}")
    return 0


def _summary(plan: Plan) -> str:
    parallel, batch = plan.config.parallel, plan.batch
    chunks = f", {parallel.num_chunks} chunks per rank" if parallel.num_chunks > 1 else ""
    return (
        f"{plan.config.name}: {plan.world_size} ranks (pp={parallel.pp} dp={parallel.dp} tp={parallel.tp}), "
        f"schedule {plan.schedule.name}{chunks}, "
        f"{batch.global_size} samples a step in {batch.num_microbatches} microbatches of {batch.micro_size}"
    )


def _drawn_schedule(plan: Plan) -> str:
    """The schedule as `trireme plan` draws it; nothing where there is no pipeline."""
    if plan.mesh.pp == 1:
        return ""
    shape = PipelineShape(
        num_pp_ranks=plan.mesh.pp,
        num_chunks=plan.config.parallel.num_chunks,
        num_microbatches=plan.batch.num_microbatches,
    )
    lists = [from_text(actions) for actions in plan.schedule.actions]
    return draw(lists, shape, width=_width(), color=sys.stdout.isatty()).rstrip() + "\n"


def _width() -> int:
    return min(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns, _MAX_WIDTH)


def _say(text: str) -> None:
    print(text, flush=True)


def _shown(path: Path) -> str:
    here = os.path.relpath(path)
    return str(path) if here.startswith("..") else here
