"""Finds stored runs and sweeps by their path, or by their name below a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.base.errors import LauncherError, did_you_mean, quoted
from launcher.base.redaction import shortened
from launcher.contract.model.checkpoint import checkpoint_folder, complete_steps
from launcher.contract.model.config_faults import SETTING
from launcher.runs.store import SWEEP_FILE, RunDirectory, absolute

DEFAULT_ROOT = "runs"
"""Where runs are looked for by name: the default of run.root."""


def all_runs(root: str = DEFAULT_ROOT) -> list[RunDirectory]:
    """Every run directory below a folder, by name."""
    folder = absolute(root)
    paths = sorted(folder.iterdir()) if os.path.isdir(folder) else []
    return [RunDirectory(path) for path in paths if os.path.isfile(RunDirectory(path).job)]


def sweep_at(word: str, root: str = DEFAULT_ROOT) -> Path | None:
    """The directory of the sweep at a path, or of a name below ``root``; None where there is none."""
    places = (absolute(word), absolute(root) / word)
    return next((path for path in places if os.path.isfile(path / SWEEP_FILE)), None)


def find_run(word: str, root: str = DEFAULT_ROOT) -> RunDirectory:
    """The run at a path, or of a name below ``root``.

    Raises:
        LauncherError: when there is none; names the nearest.
    """
    for path in (absolute(word), absolute(root) / word):
        if os.path.isfile(RunDirectory(path).job):
            return RunDirectory(path)
    if sweep := sweep_at(word, root):
        first = next((run.path for run in all_runs(str(sweep))), sweep / "0-...")
        raise LauncherError(
            f"{shortened(word)} is a sweep, and each of its points is a run: give one of them, such as "
            f"{shortened(os.path.relpath(first))}. trireme sweep status shows them all."
        )
    names = [run.path.name for run in all_runs(root)]
    hint = did_you_mean(Path(word).name, names) if names else f"There is no run in {absolute(root)}."
    raise LauncherError(f"no run directory at {shortened(word)}. {hint}")


def beginning(word: str, overrides: Sequence[str] = ()) -> str:
    """The override that has a training begin with a checkpoint: with that of RUN@STEP, or the newest of RUN.

    Raises:
        LauncherError: when there is no such run, or no such complete checkpoint, or ``overrides`` say what to
            begin with, too.
    """
    if any(other.lstrip("+~").partition("=")[0] == SETTING for other in overrides):
        raise LauncherError(f"--from and {SETTING} both say what the training begins with: give one of them.")
    name, at, step = word.rpartition("@")
    has_step = bool(at) and step.isdecimal()
    run = find_run(name if has_step else word).path
    steps = complete_steps(run)
    if not steps:
        raise LauncherError(f"--from {shortened(word)}: the run has no complete checkpoint.")
    if has_step and int(step) not in steps:
        known = ", ".join(map(str, steps))
        raise LauncherError(
            f"--from {shortened(word)}: the run has no complete checkpoint after step {step}. Those that it "
            f"has are after step {known}."
        )
    folder = checkpoint_folder(run, int(step) if has_step else steps[-1])
    return f"{SETTING}={quoted(str(folder))}"


def one_run(words: Sequence[str], verb: str) -> RunDirectory:
    """The one run that a verb is about.

    Raises:
        LauncherError: when none or several were given.
    """
    if len(words) != 1:
        given = f"given {' '.join(words)}" if words else "none given"
        raise LauncherError(
            f"trireme {verb} takes one run directory, {given}. trireme status lists the runs."
        )
    return find_run(words[0])
