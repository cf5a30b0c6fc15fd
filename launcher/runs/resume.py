"""Whether an interrupted run can be resumed, and its directory prepared for that."""

from __future__ import annotations

import json
import os
import shlex
from typing import Any

from launcher.base.errors import ConfigError, Fault, JobError
from launcher.base.files import read_json
from launcher.base.units import counted
from launcher.contract.config import NOT_COMPUTED, RunConfig
from launcher.contract.moved import with_current_names
from launcher.runs.store import START_FOLDERS, RunDirectory, absolute, check_idle, fresh_folders, saved_steps
from launcher.typed.differences import differences

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


def resumed_directory(run: RunConfig, plan_text: str) -> RunDirectory:
    """The directory of an interrupted run, prepared for another start of its ranks.

    Raises:
        ConfigError: when there is none, or another training was planned.
        JobError: when the run has not ended, has finished, or has no checkpoint.
    """
    directory = RunDirectory(absolute(run.dir or ""))
    old = _old_plan(directory, run.dir)
    check_idle(directory)
    new = json.loads(plan_text)
    changed = [
        f"{path} ({_text(before)} -> {_text(after)})"
        for path, before, after in differences(old["config"], new["config"], _TRAINING, NOT_COMPUTED)
    ]
    if old.get("exact") and new.get("exact"):  # both compute what one device computes
        changed = [setting for setting in changed if not setting.startswith("architecture.")]
    if changed:
        fix = f"Give the settings it was started with, or another run.dir. Changed: {', '.join(changed)}."
        raise ConfigError(
            [Fault("run.dir", run.dir, "cannot resume: these settings change what is trained", fix)]
        )
    _check_unfinished(directory, old["config"]["train"]["num_steps"], run.dir or "")
    # Records of other ranks cannot be continued.
    is_same_layout = all(old.get(part) == new.get(part) for part in ("mesh", "roles"))
    fresh_folders(directory, *START_FOLDERS, *(() if is_same_layout else ("metrics",)))
    return directory


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


def _check_unfinished(directory: RunDirectory, num_steps: int, given: str) -> None:
    """Refuses a run with nothing left to train: a start without steps would hide its measurements."""
    saved = saved_steps(directory.path)
    has_finished = directory.status().phase == "succeeded"
    if has_finished or max(saved, default=0) >= num_steps:
        steps = f"{num_steps} of {counted(num_steps, 'step')}"
        raise JobError(f"{given} is finished: {steps}. See it with: trireme report {shlex.quote(given)}")
    if not saved:
        raise JobError(
            f"{given} has no checkpoint to resume from. "
            "Set train.checkpoint_interval and start again with --overwrite."
        )
