"""A recipe on its way to a finished run: compose, plan, record, baseline, ranks, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from launcher.app.baseline import baseline_search, find_baseline, is_to_be_found
from launcher.app.checks import (
    allocation_notes,
    check_baseline_flag,
    check_directory_flags,
    device_faults,
    input_faults,
)
from launcher.app.ending import finish, say, shown, text_width
from launcher.app.prepared_run import Planned, alone_plan, make_plan
from launcher.app.request import Request
from launcher.app.starts import train
from launcher.base.errors import ConfigError, Fault, JobError
from launcher.base.units import counted
from launcher.contract.actions import from_text
from launcher.contract.config import LOCAL_EXECUTOR
from launcher.contract.plan import Plan
from launcher.contract.site import SiteConfig
from launcher.plan.rules.checks import with_sources
from launcher.runs.facts import checkouts, environment_facts
from launcher.runs.failure import failure_text
from launcher.runs.record import Origin, write_baseline, write_job
from launcher.runs.render import executor_of, render
from launcher.runs.resume import resumed_directory
from launcher.runs.store import RunDirectory, absolute, new_directory
from launcher.runs.watch import StopRequest, stop_requests
from launcher.schedule.drawing.grid import draw


def launch(given: Request) -> int:
    """Runs a recipe to its end; returns the exit code.

    Raises:
        LauncherError: when nothing could be started.
    """
    planned = make_plan(given.recipe, given.overrides)
    plan = planned.plan
    _check_startable(planned, given)
    directory = run_directory(plan, given)
    origin = Origin(
        recipe=given.recipe,
        overrides=given.overrides,
        facts=environment_facts(),
        checkouts=checkouts(),
    )
    with stop_requests() as stop:
        script = render(plan, directory.path, resume=given.resume)
        write_job(directory, plan, script, origin)
        for note in (*planned.composed.notes, *plan.notes, *allocation_notes(plan, directory)):
            say(f"note: {note}")
        say(f"{summary(plan)}\n{_drawn_schedule(plan)}run directory: {shown(directory.path)}")
        try:
            if given.wants_baseline:
                _settle_baseline(directory, plan, origin, stop)
            state = train(directory, plan, script, stop)
        except BaseException:
            directory.write_status("failed")
            raise
    return finish(directory, state)


def _check_startable(planned: Planned, given: Request) -> None:
    """Refuses before anything is made."""
    plan = planned.plan
    check_directory_flags(plan, given)
    check_baseline_flag(plan, given)
    faults = [*local_faults(plan), *input_faults(plan, is_here=True, is_resumed=given.resume)]
    if faults:
        raise ConfigError(with_sources(faults, planned.composed.sources))
    render(plan, absolute(plan.config.run.root))


def local_faults(plan: Plan) -> list[Fault]:
    """The faults of a plan that this machine cannot start."""
    faults = []
    if not executor_of(plan).is_local:
        fix = f"Set executor={LOCAL_EXECUTOR}, or use trireme submit."
        rule = "does not start ranks on this machine"
        faults.append(Fault("executor.name", plan.config.executor.name, rule, fix))
    faults += _site_faults(plan.config.site)
    return faults or device_faults(plan, os.environ)


def _site_faults(site: SiteConfig) -> Iterator[Fault]:
    """The settings of a cluster, none of which a run on this machine reads: its name stands for all."""
    usual = SiteConfig()
    names = [item.name for item in fields(site) if getattr(site, item.name) != getattr(usual, item.name)]
    for name in names[:1] if names[:1] == ["name"] else names:
        rule = "has no effect on a run on this machine, where nothing is reserved"
        fix = f"Leave out site{'' if name == 'name' else f'.{name}'}=, or use trireme submit."
        yield Fault(f"site.{name}", getattr(site, name), rule, fix)


def run_directory(plan: Plan, given: Request) -> RunDirectory:
    """The directory of the run: a new one, or with --resume that of an interrupted run."""
    if given.resume:
        return resumed_directory(plan.config.run, plan.to_json())
    return new_directory(plan.config.run, plan.config.name, overwrite=given.overwrite)


def _settle_baseline(directory: RunDirectory, plan: Plan, origin: Origin, stop: StopRequest) -> None:
    """Finds or makes the run on one device that this run is measured against."""
    if not is_to_be_found(directory, plan):
        return
    found = find_baseline(*baseline_search(directory, plan))
    if found is not None:
        say(f"baseline: {shown(found)}, an earlier run of the same training on one device")
    else:
        found = make_baseline(plan, origin, stop)
    if found is not None:
        write_baseline(directory, found)


def make_baseline(plan: Plan, origin: Origin, stop: StopRequest) -> Path | None:
    """Trains on one device; None where that cannot be."""
    try:
        alone = alone_plan(plan)
    except ConfigError as error:
        say(f"no baseline: this training does not run on one device:\n{error}")
        return None
    directory = new_directory(alone.config.run, alone.config.name)
    script = render(alone, directory.path)
    write_job(directory, alone, script, origin)
    say(f"baseline: the same training on one device, in {shown(directory.path)}")
    state = train(directory, alone, script, stop)
    if state.phase == "failed":
        raise JobError(
            f"the baseline failed; --no-baseline runs without it\n{failure_text(directory.path, state)}"
        )
    return directory.path if state.phase == "succeeded" else None


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


def _drawn_schedule(plan: Plan) -> str:
    """The schedule as `trireme plan` draws it; nothing where there is no pipeline."""
    if plan.mesh.pp == 1:
        return ""
    lists = [from_text(actions) for actions in plan.schedule.actions]
    return draw(lists, plan.pipeline, width=text_width(), color=sys.stdout.isatty()).rstrip() + "\n"
