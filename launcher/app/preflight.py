"""Faults of what is there to start a plan with (executor, devices, files), found before a run is made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from launcher.app.baseline import named_baseline
from launcher.app.data import is_elsewhere
from launcher.app.lifecycle import PreparedRun
from launcher.base import registry
from launcher.base.errors import LEFT_OUT, ConfigError, Fault, JobError, PlanError, offer
from launcher.base.machine import (
    free_disk_bytes,
    free_memory_bytes,
    installed_gpus,
    missing_for_compile,
    num_visible,
)
from launcher.base.units import counted, format_bytes, format_duration
from launcher.contract.config import LOCAL_EXECUTOR
from launcher.contract.data.samples import text_faults
from launcher.contract.executor import Executor
from launcher.contract.model.checkpoint import (
    checkpoint_faults,
    checkpoint_notes,
    first_step,
    source_checkpoint,
)
from launcher.contract.model.folder import initial_weights_faults
from launcher.contract.plan import Plan
from launcher.contract.site import SiteConfig
from launcher.plan.rules.checks import with_sources
from launcher.plan.rules.fusion import NOT_COMPILED
from launcher.report.comparability import incomparable
from launcher.report.runs import read_plan
from launcher.runs.render import executor_of
from launcher.runs.store import RunDirectory, saved_steps
from launcher.typed.read import Source


def refuse(faults: Sequence[Fault], sources: Mapping[str, Source]) -> None:
    """Raises what is wrong, if anything is, with the lines that have set it.

    Raises:
        ConfigError: with the faults.
    """
    if faults:
        raise ConfigError(with_sources(faults, sources))


def start_faults(run: PreparedRun, *, is_here: bool) -> list[Fault]:
    """Why a run cannot be started with what there is, on this machine or by a scheduler."""
    return [
        *executor_faults(run, is_here=is_here),
        *input_faults(run.plan, is_here=is_here, is_resumed=run.resume),
    ]


def executor_faults(run: PreparedRun, *, is_here: bool) -> list[Fault]:
    """Why its executor cannot start a run on this machine, or as a scheduler."""
    if is_here:
        faults = [*_setting_faults(run.plan), *_notify_faults(run.plan)] or device_faults(
            run.plan, os.environ
        )
        if faults := faults or [*room_faults(run.plan, run.directory.path)]:
            return faults
    try:
        _ = run.script
    except PlanError as error:
        return list(error.faults)
    return []


def _notify_faults(plan: Plan) -> Iterator[Fault]:
    """A command that this machine does not have: no event would reach anybody."""
    command = plan.config.run.notify
    if command and shutil.which(os.path.expanduser(command[0])) is None:
        rule = f"{command[0]} is no command that this machine can execute"
        yield Fault("run.notify", list(command), rule, ways=({"run.notify": []},))


_OF_FILES = ("group_access", "group")
"""Settings of a site that are not those of its batch system."""


def _setting_faults(plan: Plan) -> Iterator[Fault]:
    """An executor of other machines, and the settings of a cluster, none of which a run on this machine
    reads: its name stands for all."""
    if not executor_of(plan).is_local:
        fix = f"Set executor={LOCAL_EXECUTOR}, or use trireme submit."
        rule = "does not start ranks on this machine"
        ways: tuple[Mapping[str, str], ...] = ({"executor": LOCAL_EXECUTOR},)
        yield Fault("executor.name", plan.config.executor.name, rule, fix, ways=ways)
    site, usual = plan.config.site, SiteConfig()
    names = [
        item.name
        for item in fields(site)
        if item.name not in _OF_FILES and getattr(site, item.name) != getattr(usual, item.name)
    ]
    for name in names[:1] if names[:1] == ["name"] else names:
        rule = "has no effect on a run on this machine, where nothing is reserved"
        setting = "site" if name == "name" else f"site.{name}"
        fix, ways = f"Leave out {setting}, or use trireme submit.", ({setting: LEFT_OUT},)
        yield Fault(f"site.{name}", getattr(site, name), rule, fix, ways=ways)


def seen_faults(plan: Plan) -> list[Fault]:
    """The faults of initial weights that are on this machine. Those that are not may be where the ranks
    start; of a container's nothing is seen. A checkpoint of another run is there where that is this machine.
    """
    if plan.config.site.container_image is not None:
        return []
    return _initial_faults(plan, needs_weights=False, needs_source=_starts_here(plan))


def source_notes(plan: Plan) -> tuple[str, ...]:
    """Says that the checkpoint of another run, which a training begins with, could not be looked at, or what
    its model computed otherwise."""
    source = source_checkpoint(plan.config.train)
    if source is None or source.run_dir.is_dir():
        return tuple(checkpoint_notes(plan.config))
    return (f"{source.folder}, which it begins with, is not on this machine: nothing of it is checked.",)


def _starts_here(plan: Plan) -> bool:
    """Whether the ranks of a plan can only be meant to start on this machine."""
    config = plan.config
    return executor_of(plan).is_local and config.site.name == SiteConfig().name and config.cluster.nodes == 1


def input_faults(plan: Plan, *, is_here: bool, is_resumed: bool = False) -> list[Fault]:
    """The faults of data and of weights that are not there, of a baseline that the run could not be
    compared with, and of a compiler that is missing.

    ``is_here``: the ranks start on this machine, in this environment. ``is_resumed``: from a checkpoint.
    """
    compiler = _compiler_faults(plan) if is_here else ()
    is_hidden = not is_here and plan.config.site.container_image is not None
    weights = [] if is_resumed or is_hidden else _initial_faults(plan)
    return [*_data_faults(plan, is_here=is_here), *weights, *_baseline_faults(plan), *compiler]


def _initial_faults(plan: Plan, *, needs_weights: bool = True, needs_source: bool = True) -> list[Fault]:
    """The faults of what a training begins with: a folder of weights, or a checkpoint of another run."""
    return [
        *initial_weights_faults(plan.config, is_needed=needs_weights),
        *checkpoint_faults(plan.config, plan.num_parameters, is_needed=needs_source),
    ]


def _compiler_faults(plan: Plan) -> Iterator[Fault]:
    """A fault of layers that are to be compiled on a machine that cannot."""
    how, kind = plan.config.fusion.compile, plan.config.device.kind
    if how != "none" and (missing := missing_for_compile(os.environ, kind)):
        yield Fault("fusion.compile", how, f"this machine has {missing}", ways=NOT_COMPILED)


def device_faults(plan: Plan, environment: Mapping[str, str]) -> list[Fault]:
    """A fault when a plan for CUDA has more ranks than this machine has devices to give."""
    if plan.config.device.kind != "cuda":
        return []
    visible = num_visible(installed_gpus(), environment)
    if plan.world_size <= visible:
        return []
    names = environment.get("CUDA_VISIBLE_DEVICES")
    shown = f" (CUDA_VISIBLE_DEVICES={names})" if names is not None else ""
    ranks = counted(plan.world_size, "rank")
    rule = f"the plan has {ranks} on as many CUDA devices, and {visible} can be used here{shown}"
    ways = ({"device": "cpu", "cluster": "local_cpu"},)
    fix = f"Use fewer ranks, or s{offer(ways)[1:]}" if visible else ""
    return [Fault("device.kind", "cuda", rule, fix, ways=ways)]


def room_faults(plan: Plan, run_dir: Path) -> Iterator[Fault]:
    """Too little memory of this machine for its ranks, too little room on a disk for a checkpoint."""
    free, needed = free_memory_bytes(), plan.node_memory_bytes(plan.world_size)
    device = plan.config.device
    if device.kind == "cpu" and device.memory_check == "refuse" and free is not None and free < needed:
        rule = (
            f"by prediction the ranks on this machine need {format_bytes(needed)}, of which "
            f"{format_bytes(free)} can be had"
        )
        fix = "End other programs, or have the plan take less."
        yield Fault("device.memory_bytes", device.memory_bytes, rule, fix)
    free, needed = free_disk_bytes(str(run_dir)), plan.checkpoint_bytes
    if free < needed:
        rule = f"a checkpoint takes about {format_bytes(needed)}, and {format_bytes(free)} can be had there"
        yield Fault("run.dir", str(run_dir), rule, "Set run.dir or run.root to another place.")


def _data_faults(plan: Plan, *, is_here: bool) -> list[Fault]:
    # A user's own dataset is measured when it is planned.
    is_unseen = plan.config.data.source is None or is_elsewhere(plan.config, is_here=is_here)
    return [] if is_unseen else text_faults(plan.config, plan.batch)


def _baseline_faults(plan: Plan) -> list[Fault]:
    setting = plan.config.report.baseline
    if setting in ("auto", "none"):
        return []
    try:
        base = named_baseline(setting)
    except ConfigError as error:
        return list(error.faults)
    return list(incomparable(plan.config, read_plan(base).config, base.name))


def allocation_notes(plan: Plan, directory: RunDirectory) -> tuple[str, ...]:
    """Says that a run would be cut short, by its predicted time."""
    executors = [registry.load(Executor, name) for name in registry.own_plugins(Executor.entry_group)]
    inside = [(executor, os.environ.get(executor.job_variable or "")) for executor in executors]
    executor, job = next((found for found in inside if found[1]), (None, None))
    if executor is None or job is None:
        return ()
    try:
        left_s = executor.time_left_s(job)
    except JobError:  # the machine has none of its commands: nothing is known
        return ()
    *_, done = (first_step(plan.config.train), *saved_steps(directory.path))
    needed_s = (plan.config.train.num_steps - done) * plan.schedule.step_s
    if left_s is None or needed_s <= left_s:
        return ()
    cut = "Set train.checkpoint_interval, so that --resume can go on,"
    if plan.config.train.checkpoint_interval:
        cut = "Go on with --resume,"
    return (
        f"Job {job}, which this runs inside of, ends in {format_duration(left_s)}, and the run is predicted "
        f"to take {format_duration(needed_s)}: it would be cut short. {cut} or ask for a longer time.",
    )
