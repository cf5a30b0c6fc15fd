"""Whether an interrupted run can be resumed, and its directory prepared for that."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from launcher.base.errors import ConfigError, Fault, JobError, quoted
from launcher.base.files import read_json
from launcher.base.units import counted
from launcher.contract.config import NOT_COMPUTED, LaunchConfig
from launcher.contract.data.files import PACKAGE, input_files
from launcher.contract.inputs.record import INPUTS, read_inputs
from launcher.contract.inputs.text import file_digests
from launcher.contract.inputs.user_code import code_digests
from launcher.contract.job import CHECKPOINTS, RunConfig, checkpoint_name
from launcher.contract.moved import with_current_names
from launcher.contract.optim.config import OptimConfig
from launcher.contract.optim.rates import learning_rate
from launcher.contract.plan import Plan
from launcher.runs.claim import Say
from launcher.runs.store import (
    START_FOLDERS,
    RunDirectory,
    absolute,
    check_idle,
    free_name,
    fresh_folders,
    hold,
    move_aside,
    released,
    saved_steps,
)
from launcher.typed.differences import differences
from launcher.typed.read import Reading, field_types, plain, read

_TRAINING = (
    "seed",
    "model",
    "data",
    "batch.global_size",
    "batch.seq_length",
    "optim",
    "train",
    "precision",
    "architecture",
)
"""The settings that determine what is computed. The others may change: a checkpoint does not depend on
how the run is distributed."""
_FREE = (*NOT_COMPUTED, "train.eval_interval", "train.eval_batches", "train.init_optimizer")
_LENGTH = ("train.num_steps", "optim.decay_steps", "optim.cooldown_steps")


def resumed_directory(
    run: RunConfig,
    plan_text: str,
    others: Sequence[Fault] = (),
    *,
    step: int | None = None,
    say: Say = lambda text: None,
) -> RunDirectory:
    """The directory of an interrupted run, prepared for another start of its ranks, with its lock.

    ``others``: further faults, to be told with those that are found. ``step``: of the checkpoint that they
    go on from; None: the newest one's. ``say``: tells what is waited for.

    Raises:
        ConfigError: when there is none, or another training was planned.
        JobError: when the run has not ended, has finished, or has no such checkpoint.
    """
    directory = RunDirectory(absolute(run.dir or ""))
    _old_plan(directory, run.dir)
    with released(hold(directory, say), on_error_alone=True) as mine:
        check_idle(mine)
        _prepare(mine, run, plan_text, others, step)
    return mine


def _prepare(
    directory: RunDirectory, run: RunConfig, plan_text: str, others: Sequence[Fault], step: int | None
) -> None:
    """Refuses a start that does not go on with the same training, and moves aside what is of the last one."""
    old = _old_plan(directory, run.dir)
    new = json.loads(plan_text)
    num_done = max(saved_steps(directory.path), default=0) if step is None else step
    changed = [
        f"{path} ({_text(before)} -> {_text(after)})"
        for path, before, after in _changed_settings(old, new, num_done)
    ]
    faults = [*others]
    if changed:
        rule = f"cannot resume: settings that change what is trained differ: {', '.join(changed)}"
        fix = "Give those that it was started with, or another run.dir."
        faults.insert(0, Fault("run.dir", run.dir, rule, fix))
    if faults:
        raise ConfigError(faults)
    is_longer = new["config"]["train"]["num_steps"] > old["config"]["train"]["num_steps"]
    _check_unfinished(
        directory, new["config"]["train"]["num_steps"], run.dir or "", is_longer=is_longer, step=step
    )
    # Records of other ranks cannot be continued.
    is_same_layout = all(old.get(part) == new.get(part) for part in ("mesh", "roles"))
    fresh_folders(directory, *START_FOLDERS, *(() if is_same_layout else ("metrics",)))


def began_with(run: RunConfig) -> tuple[str, ...]:
    """The settings of what the run in ``run.dir`` began with, as overrides; none where that is nothing."""
    plan: dict[str, Any] = with_current_names(read_json(RunDirectory(absolute(run.dir or "")).plan))
    with suppress(LookupError, TypeError):
        train = plan["config"]["train"]
        if isinstance(train["init_from"], str):
            optimizer = str(bool(train.get("init_optimizer"))).lower()
            return f"train.init_from={quoted(train['init_from'])}", f"train.init_optimizer={optimizer}"
    return ()


def _changed_settings(
    old: dict[str, Any], new: dict[str, Any], num_done: int
) -> Iterator[tuple[str, Any, Any]]:
    """The settings that change what is trained, with both values. More steps do not where every step before
    the old end, or each of the ``num_done`` that were made, keeps its learning rate, nor another architecture
    where both compute what one device does."""
    before, after = _with_defaults(old["config"]), new["config"]
    parts = [part for part in _TRAINING if part != "architecture"]
    parts += [] if old.get("exact") and new.get("exact") else ["architecture"]
    yield from differences(before, after, parts, (*_FREE, *_LENGTH))
    took, takes = (bool(config["train"].get("init_optimizer")) for config in (before, after))  # older: none
    if took != takes:
        yield "train.init_optimizer", took, takes
    num_steps, more = before["train"]["num_steps"], after["train"]["num_steps"]
    end, new_end = _decay_end(before), _decay_end(after)
    cooldowns = [config.get("optim", {}).get("cooldown_steps") for config in (before, after)]
    if more < num_steps:
        yield "train.num_steps", num_steps, more
    elif None in (end, new_end) or _have_same_rates(before, after, num_done):
        return  # a decay in place of a constant rate is told by its own setting
    elif end == new_end:
        if cooldowns[0] != cooldowns[1]:
            yield "optim.cooldown_steps", *cooldowns
    elif new_end == more > num_steps:
        yield "train.num_steps", num_steps, f"{more}; optim.decay_steps={end} keeps the learning rates"
    else:
        yield "optim.decay_steps", end, new_end


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Stored settings, with those that the launcher of that time did not have: it did what their defaults
    say."""
    found = dict(config)
    for item in fields(LaunchConfig):
        kind, group = field_types(LaunchConfig)[item.name], config.get(item.name)
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(group, dict):
            defaults = {one.name: plain(one.default) for one in fields(kind) if one.default is not MISSING}
            found[item.name] = defaults | group
    return found


def _have_same_rates(before: dict[str, Any], after: dict[str, Any], num_done: int) -> bool:
    """Whether each of the steps that were made has the same learning rate under both configurations."""
    found = [read(OptimConfig, config.get("optim", {}), Reading()) for config in (before, after)]
    lengths = [config["train"]["num_steps"] for config in (before, after)]
    if None in found:
        return False
    rates = [
        [learning_rate(optim, step, length) for step in range(num_done)]
        for optim, length in zip(found, lengths, strict=True)
        if optim
    ]
    return rates[0] == rates[1]


def _decay_end(config: dict[str, Any]) -> int | None:
    """The number of steps after which the learning rate falls no more; None: it does not fall."""
    optim = config.get("optim", {})
    if optim.get("decay") == "constant":
        return None
    if optim.get("decay") == "inverse_sqrt" and not optim.get("decay_steps"):
        return None
    return int(optim.get("decay_steps") or config["train"]["num_steps"])


def changed_inputs(plan: Plan, run_dir: Path) -> list[str]:
    """What differs from the data and the code that a run was started with, as far as this machine has what
    its ranks will have: they compare all of it."""
    old = read_inputs(run_dir)
    if old is None:
        return []
    config, data = plan.config, dict(old.data)
    sources = config.data.all_sources.values()
    has_image, has_python = config.site.container_image, config.site.python
    is_packaged = any(source.startswith(PACKAGE) for source in sources)
    if sources and not (has_image or (has_python and is_packaged)):
        data = file_digests(input_files(config.data), old.num_blocks)
    found = code_digests(config, plan.source_roots, with_installed=not (has_image or has_python))
    code = {name: found.get(name, digest) for name, digest in old.code.items()}
    return old.changes(replace(old, data=data, code=code))


def forget_inputs(directory: RunDirectory) -> None:
    """Moves aside what a run was started with, so that its next start writes down what there is then."""
    if (path := directory.path / INPUTS).is_file():
        move_aside(path)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _old_plan(directory: RunDirectory, given: str | None) -> dict[str, Any]:
    """The plan that the run was started with."""
    if not os.path.isfile(directory.plan):
        fix = "Give run.dir the directory of an earlier run, or leave out --resume."
        rule = "holds no plan.json, so there is nothing to resume"
        raise ConfigError([Fault("run.dir", given, rule, fix)])
    plan: dict[str, Any] = with_current_names(read_json(directory.plan))
    try:
        int(plan["config"]["train"]["num_steps"])
    except (KeyError, TypeError, ValueError):
        rule = "its plan.json is damaged, so it cannot be resumed"
        fix = "Start again with --overwrite, or with another run.dir."
        raise ConfigError([Fault("run.dir", given, rule, fix)]) from None
    return plan


def set_aside_newer(directory: RunDirectory, step: int) -> tuple[list[int], Path | None]:
    """Moves the checkpoints after ``step`` out of the run's line, so that whatever takes the newest from now
    on, as a requeued job does, takes one of the line that begins there. Returns their steps and the folder
    that has them.

    The newest goes first: those that are left are the beginning of the old line whenever this is cut off.
    """
    newer = [other for other in saved_steps(directory.path) if other > step]
    if not newer:
        return [], None
    aside = free_name(directory.path / CHECKPOINTS)
    aside.mkdir()
    for name in map(checkpoint_name, reversed(newer)):
        (directory.path / CHECKPOINTS / name).rename(aside / name)
    return newer, aside


def put_back(directory: RunDirectory, newer: Sequence[int], aside: Path) -> None:
    """Undoes `set_aside_newer`, the oldest first."""
    for name in map(checkpoint_name, newer):
        (aside / name).rename(directory.path / CHECKPOINTS / name)
    aside.rmdir()


def _check_unfinished(
    directory: RunDirectory, num_steps: int, given: str, *, is_longer: bool, step: int | None
) -> None:
    """Refuses a run with nothing left to train: a start without steps would hide its measurements."""
    saved = saved_steps(directory.path)
    if step is not None and saved and step not in saved:
        known = ", ".join(map(str, saved))
        raise JobError(
            f"--resume={step}: {given} has no checkpoint after step {step}. Those that it has are after step "
            f"{known}."
        )
    has_finished = directory.status().phase == "succeeded" and not is_longer and step is None
    if has_finished or (max(saved, default=0) if step is None else step) >= num_steps:
        if step is None and directory.status().phase != "succeeded":
            # Whatever ended its last start, that had saved the last step.
            directory.write_status("succeeded")
        steps = f"{num_steps} of {counted(num_steps, 'step')}"
        raise JobError(f"{given} is finished: {steps}. See it with: trireme report {shlex.quote(given)}")
    if not saved:
        raise JobError(
            f"{given} has no checkpoint to resume from. "
            "Set train.checkpoint_interval and start again with --overwrite."
        )
