"""What `trireme run` and `trireme submit` refuse before anything is made."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

from launcher.cli.words import Words
from launcher.compilers import missing_for_compile
from launcher.config.data_files import PACKAGE, text_faults
from launcher.config.model_files import initial_weights_faults
from launcher.errors import ConfigError, Fault, LauncherError
from launcher.jobs.baseline import named_baseline
from launcher.plan.fusion import NOT_COMPILED
from launcher.plan.model import Plan
from launcher.report.constant import incomparable
from launcher.report.runs import read_plan


def check_directory_flags(plan: Plan, given: Words) -> None:
    """Refuses --resume and --overwrite without the directory that they are about.

    Raises:
        LauncherError: naming the flag.
    """
    for flag in ("resume", "overwrite"):
        if given.flags[flag] and plan.config.run.dir is None:
            raise LauncherError(f"--{flag} needs the directory it is about. Give run.dir=DIRECTORY.")


def check_baseline_flag(plan: Plan, given: Words) -> None:
    """Refuses --no-baseline for a run that names its baseline.

    Raises:
        LauncherError: naming both.
    """
    baseline = plan.config.report.baseline
    if given.flags["no-baseline"] and baseline not in ("auto", "none"):
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
