"""Faults of settings, raised as a configuration is loaded: inside a group, and between groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.base.errors import LEFT_OUT, Fault, nearest, offer
from launcher.base.files import safe_name
from launcher.base.units import counted
from launcher.config.paths import walk
from launcher.config.site_rules import secret_variable_faults, site_faults
from launcher.contract.config import (
    DeviceConfig,
    FusionConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from launcher.contract.data.config import DataConfig
from launcher.contract.job import ReportConfig
from launcher.contract.model.checkpoint import first_step, source_checkpoint
from launcher.contract.optim.config import OptimConfig
from launcher.typed.read import plain

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_AS_WRITTEN = ("site.setup", "site.node_env", "site.scratch", "site.env", "model.options", "data.options")
"""Settings whose texts others read: shells, and functions of the user."""
_PATHS = (
    *("run.dir", "run.root", "model.path", "train.init_from", "data.source", "data.eval_source"),
    *("data.tokenizer", "data.cache_dir"),
    *("device.measured_in", "report.baseline"),
)
_LISTED_PATHS = re.compile(r"site\.(python|container_mounts\[\d+\])|data\.source\[\d+\]")
"""Settings that hold paths, and are told without a way out: of lists, or ~ stands for no folder."""
_VARIABLE = re.compile(r"\$[A-Z_]{2}|(?<![^/:])\$[A-Za-z_]\w*(?![^/:])")
"""One in capitals anywhere, as ``$USER-runs``, or any that is a whole part of a path."""
_AT_HOME = re.compile(r"\$HOME(?=/|$)")
_FOLLOWED_STEPS = 2
"""Steps after a start during which the activation memory is measured."""
_NUMBER_FORMATS = ("fp32", "tf32", "bf16", "fp16")


def rule_faults(parts: Mapping[str, Any]) -> Iterator[Fault]:
    """The faults of the given groups against every rule whose groups are all given."""
    for path, value in walk(plain(dict(parts))):
        # Line breaks and the like would break a job script or a log.
        if isinstance(value, str) and not value.isprintable():
            printable = "".join(letter for letter in value if letter.isprintable())
            rule = "holds a control character"
            yield Fault(path, repr(value), rule, f"Write {printable!r}.", ways=({path: printable},))
        if isinstance(value, str) and "${" in value and not path.startswith(_AS_WRITTEN):
            rule = "is taken as it is written here, and nothing expands its ${...}"
            yield Fault(path, value, rule, "Write what it stands for.")
        # A shell replaces it, unless the path stood in single quotes or in a file.
        elif isinstance(value, str) and (path in _PATHS or _LISTED_PATHS.fullmatch(path)):
            yield from _variable_faults(path, value)
    for names, rules in _RULES:
        if all(name in parts for name in names):
            yield from rules(*(parts[name] for name in names))


def _variable_faults(path: str, value: str) -> Iterator[Fault]:
    below_home = "~" + value[home.end() :] if (home := _AT_HOME.match(value)) else value
    is_at_home = path in _PATHS and home is not None and not _VARIABLE.search(below_home)
    ways = ({path: below_home},) if is_at_home else ()
    if _VARIABLE.search(value):
        fix = "" if ways else "Write what it stands for."
        yield Fault(path, value, "no variable is replaced in this path", fix, ways=ways)


def _name_rules(name: str) -> Iterator[Fault]:
    if not _NAME.fullmatch(name):
        rule = "names files and jobs, so it holds only letters, digits, . _ - (at most 100)"
        yield Fault("name", name, rule, ways=({"name": safe_name(name)},))


def _target_rules(part: ModelConfig | DataConfig) -> Iterator[Fault]:
    group, target, options = "model" if isinstance(part, ModelConfig) else "data", part.target, part.options
    if target is None and options:
        path, rule = f"{group}.options", f"has no effect without {group}.target"
        yield Fault(path, options, rule, f"Remove {path}.", ways=({path: LEFT_OUT},))
    if target is not None and not _TARGET.fullmatch(target):
        fix = "Write my_package.my_module:my_function."
        yield Fault(f"{group}.target", target, "must be package.module:function", fix)


def _device_rules(device: DeviceConfig) -> Iterator[Fault]:
    for name in device.peak_flops:
        if name not in _NUMBER_FORMATS:
            near = nearest(name, _NUMBER_FORMATS)
            rule = f"{name} is not one of {', '.join(_NUMBER_FORMATS)}"
            fix = f"Did you mean {near}?" if near else "Remove it."
            path, value = f"device.peak_flops.{name}", device.peak_flops[name]
            way = {path: LEFT_OUT} | ({f"device.peak_flops.{near}": value} if near else {})
            yield Fault(path, value, rule, fix, ways=(way,))


def _decay_rules(optim: OptimConfig) -> Iterator[Fault]:
    if optim.decay == "constant" or optim.decay_steps is None or optim.decay_steps > optim.warmup_steps:
        return
    rule = f"ends the decay before it begins, after the {optim.warmup_steps} steps of optim.warmup_steps"
    ways = ({"optim.decay_steps": optim.warmup_steps + 1}, {"optim.decay_steps": None})
    yield Fault("optim.decay_steps", optim.decay_steps, rule, ways=ways)


def _cooldown_rules(optim: OptimConfig, train: TrainConfig) -> Iterator[Fault]:
    stable = (optim.decay_steps or train.num_steps) - optim.warmup_steps
    if optim.decay == "wsd" and optim.cooldown_steps is not None and optim.cooldown_steps > stable > 0:
        rule = f"is longer than the {counted(stable, 'step')} between the warm-up and the end of the decay"
        ways = ({"optim.cooldown_steps": stable}, {"optim.cooldown_steps": None})
        yield Fault("optim.cooldown_steps", optim.cooldown_steps, rule, ways=ways)


def _keeping_rules(train: TrainConfig) -> Iterator[Fault]:
    interval, every = train.checkpoint_interval, train.keep_every
    if interval and every % interval:
        rule = f"must be a multiple of train.checkpoint_interval = {interval}: others are not saved"
        ways = ({"train.keep_every": -(-every // interval) * interval}, {"train.keep_every": 0})
        yield Fault("train.keep_every", every, rule, ways=ways)
    elif every > train.num_steps:
        rule = f"keeps none of a run of train.num_steps = {train.num_steps} steps"
        yield Fault("train.keep_every", every, rule, ways=({"train.keep_every": 0},))


def _beginning_rules(train: TrainConfig) -> Iterator[Fault]:
    if not train.init_optimizer or train.init_from is None:
        return
    alone = {"train.init_optimizer": False}
    if source_checkpoint(train) is None:
        rule = "takes the state of an optimizer, and train.init_from is no checkpoint of a run, which has one"
        yield Fault("train.init_optimizer", True, rule, ways=(alone,))
    elif (done := first_step(train)) >= train.num_steps:
        rule = f"counts the {counted(done, 'step')} of the checkpoint that train.init_optimizer goes on from"
        fix = f"Set train.num_steps to more than {done}, or train.init_optimizer=false."
        yield Fault("train.num_steps", train.num_steps, rule, fix, ways=(alone,))


def _evaluation_rules(train: TrainConfig, data: DataConfig) -> Iterator[Fault]:
    if train.eval_batches and not data.eval_fraction and data.eval_source is None:
        rule = "nothing is left to evaluate on while data.eval_fraction is 0"
        ways = ({"train.eval_batches": 0}, {"data.eval_fraction": 0.05})
        yield Fault("train.eval_batches", train.eval_batches, rule, ways=ways)


def _measure_rules(train: TrainConfig, report: ReportConfig) -> Iterator[Fault]:
    num_steps, of = train.num_steps - first_step(train), "of train.num_steps"
    of = f"after the checkpoint that train.init_from names up to {of[3:]}" if first_step(train) else of
    if report.warmup_steps >= num_steps > 0:
        rule = f"leaves none of the {num_steps} steps {of} to measure"
        rule = rule if num_steps > 1 else f"leaves nothing of the one step {of} to measure"
        ways = ({"report.warmup_steps": num_steps // 2},)
        fix = f"{offer(ways)[:-1]}, or a larger train.num_steps."
        yield Fault("report.warmup_steps", report.warmup_steps, rule, fix, ways=ways)


def _claims_rules(report: ReportConfig, parallel: ParallelConfig, fusion: FusionConfig) -> Iterator[Fault]:
    if not report.claims:
        return
    off = {"report.claims": False}
    if parallel.pp == 1:
        rule = "measures pipeline schedules, and parallel.pp is 1"
        yield Fault(
            "report.claims", "true", rule, "Set report.claims=false, or a larger parallel.pp.", ways=(off,)
        )
    if fusion.compile != "none":
        rule = "tracks what each operation saves for the backward, and fusion.compile fuses operations"
        yield Fault("report.claims", "true", rule, ways=(off, {"fusion.compile": "none"}))
    if report.warmup_steps < _FOLLOWED_STEPS:
        rule = "includes the second step, which report.claims slows down"
        ways = ({"report.warmup_steps": _FOLLOWED_STEPS},)
        yield Fault("report.warmup_steps", report.warmup_steps, rule, ways=ways)


_RULES: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Fault]]], ...] = (
    (("name",), _name_rules),
    (("model",), _target_rules),
    (("data",), _target_rules),
    (("device",), _device_rules),
    (("optim",), _decay_rules),
    (("optim", "train"), _cooldown_rules),
    (("train",), _keeping_rules),
    (("train",), _beginning_rules),
    (("train", "data"), _evaluation_rules),
    (("train", "report"), _measure_rules),
    (("report", "parallel", "fusion"), _claims_rules),
    (("site",), secret_variable_faults),
    (("site",), site_faults),
)
"""The groups that each set of rules reads, and the rules."""
