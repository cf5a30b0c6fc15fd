"""What `trireme run` and `trireme submit` refuse, or warn of, before anything is made."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder

from launcher.app.baseline import named_baseline
from launcher.app.request import Request
from launcher.base import registry
from launcher.base.errors import ConfigError, Fault, JobError, LauncherError
from launcher.base.machine import installed_gpus, missing_for_compile, num_visible
from launcher.base.units import counted, format_duration
from launcher.contract.data_files import PACKAGE, initial_weights_faults, text_faults
from launcher.contract.executor import Executor
from launcher.contract.plan import Plan
from launcher.plan.rules.fusion import NOT_COMPILED
from launcher.report.comparability import incomparable
from launcher.report.runs import read_plan
from launcher.runs.store import RunDirectory, saved_steps


def check_directory_flags(plan: Plan, given: Request) -> None:
    """Refuses --resume and --overwrite without the directory that they are about.

    Raises:
        LauncherError: naming the flag.
    """
    for flag, is_given in (("resume", given.resume), ("overwrite", given.overwrite)):
        if is_given and plan.config.run.dir is None:
            raise LauncherError(f"--{flag} needs the directory it is about. Give run.dir=DIRECTORY.")


def check_baseline_flag(plan: Plan, given: Request) -> None:
    """Refuses --no-baseline for a run that names its baseline.

    Raises:
        LauncherError: naming both.
    """
    baseline = plan.config.report.baseline
    if not given.wants_baseline and baseline not in ("auto", "none"):
        raise LauncherError(f"--no-baseline and report.baseline={baseline} exclude each other: give one.")


def input_faults(plan: Plan, *, is_here: bool, is_resumed: bool = False) -> list[Fault]:
    """The faults of data and of weights that are not there, of a baseline that the run could not be
    compared with, and of a compiler that is missing.

    ``is_here``: the ranks start on this machine, in this environment. ``is_resumed``: from a checkpoint.
    """
    compiler = _compiler_faults(plan) if is_here else []
    is_hidden = not is_here and plan.config.site.container_image is not None
    weights = [] if is_resumed or is_hidden else [*initial_weights_faults(plan.config)]
    return [*_data_faults(plan, is_here=is_here), *weights, *_baseline_faults(plan), *compiler]


def _compiler_faults(plan: Plan) -> list[Fault]:
    """A fault of layers that are to be compiled on a machine that cannot."""
    config = plan.config
    missing = missing_for_compile(os.environ, config.device.kind) if config.fusion.compile != "none" else ""
    if not missing:
        return []
    return [Fault("fusion.compile", config.fusion.compile, f"this machine has {missing}", ways=NOT_COMPILED)]


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
    fix = "Use fewer ranks, or set" if visible else "Set"
    return [Fault("device.kind", "cuda", rule, f"{fix} device=cpu cluster=local_cpu.")]


def _data_faults(plan: Plan, *, is_here: bool) -> list[Fault]:
    data, site = plan.config.data, plan.config.site
    if not is_here and site.container_image is not None:
        return []  # what the container holds is not seen from here
    has_other_packages = not is_here and site.python is not None
    if data.target is not None:
        return [] if has_other_packages else _target_faults(data.target, plan.source_roots)
    assert data.source is not None, "a plan has data of one kind"
    if data.source.startswith(PACKAGE) and has_other_packages:
        return []
    return text_faults(plan.config, plan.batch.global_size)


def _target_faults(target: str, source_roots: tuple[str, ...]) -> list[Fault]:
    """A fault of a user's own dataset whose module is nowhere; it is not imported."""
    name = target.partition(":")[0].partition(".")[0]
    beside = PathFinder.find_spec(name, source_roots)
    if beside or any(finder.find_spec(name, None) for finder in sys.meta_path):  # editable installs have one
        return []
    rule = f"no module {name} is beside the recipe, in the current folder, or installed"
    return [Fault("data.target", target, rule, f"Put {name}.py beside the recipe.")]


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
    *_, done = (0, *saved_steps(directory.path))
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
