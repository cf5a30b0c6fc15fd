"""The directory of a sweep: made once, with a run directory for every point that can run.

SWEEP/sweep.json   which points there are     SWEEP/NN-pp_2/   the run of a point, as any other
SWEEP/tasks/N      leads to the run of point N, for schedulers that know their tasks by number
SWEEP/source/      the code of all points, where they were submitted

How a point stands is read from its run directory, and kept nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.app.find_runs import DEFAULT_ROOT, sweep_at
from launcher.app.sweep.tables import Refusal
from launcher.base.errors import ConfigError, Fault, LauncherError, did_you_mean
from launcher.contract.config import RunConfig
from launcher.runs.store import (
    SUBFOLDERS,
    SWEEP_FILE,
    RunDirectory,
    absolute,
    check_idle,
    move_aside,
    numbered_folder,
    read_json,
    saved_steps,
)

if TYPE_CHECKING:
    from launcher.app.sweep.grid import Point  # loads Hydra, which a stored sweep does not need

VERSION = 1
"""Of sweep.json; raised when a field changes its meaning."""
TASKS = "tasks"


@dataclass(frozen=True, kw_only=True)
class StoredPoint:
    """A point that could run when the sweep was made."""

    label: str
    overrides: tuple[str, ...]
    """All that the recipe was composed with."""
    directory: RunDirectory


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep's directory, read."""

    path: Path
    """Absolute."""
    recipe: str
    points: tuple[StoredPoint, ...]
    refused: tuple[tuple[str, str], ...]
    """Label and first reason of the points that could not run."""

    @property
    def tasks(self) -> Path:
        """Where the runs go by number."""
        return self.path / TASKS


@dataclass(frozen=True, kw_only=True)
class NewSweep:
    """What a sweep is made of."""

    name: str
    recipe: str
    words: tuple[str, ...]
    points: tuple[Point, ...]
    refused: tuple[Refusal, ...]


def make_sweep(run: RunConfig, new: NewSweep) -> Sweep:
    """Makes the directory: run.dir, or one below run.root that is named by the time. Holds no runs yet.

    Raises:
        ConfigError: when run.dir exists, or cannot be made.
    """
    try:
        path = _named_folder(run.dir) if run.dir else numbered_folder(run, f"{new.name}-sweep")
        (path / TASKS).mkdir()
        folders = [point.folder(place, len(new.points)) for place, point in enumerate(new.points)]
        for place, folder in enumerate(folders):
            (path / TASKS / str(place)).symlink_to(Path("..") / folder)
    except OSError as error:
        setting, given = ("run.dir", run.dir) if run.dir else ("run.root", run.root)
        rule, fix = f"cannot be created: {error.strerror}", f"Set {setting} to a writable folder."
        raise ConfigError([Fault(setting, given, rule, fix)]) from error
    content = {
        "version": VERSION,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "recipe": new.recipe,
        "words": list(new.words),
        "points": [
            {"folder": folder, "label": point.label, "overrides": list(point.overrides)}
            for folder, point in zip(folders, new.points, strict=True)
        ],
        "refused": [
            {
                "label": refusal.label,
                "overrides": list(refusal.overrides),
                "reasons": [str(fault) for fault in refusal.faults],
            }
            for refusal in new.refused
        ],
    }
    RunDirectory(path).write(SWEEP_FILE, json.dumps(content, indent=1) + "\n")
    return read_sweep(path)


def read_sweep(path: Path) -> Sweep:
    """The sweep in a directory.

    Raises:
        LauncherError: when there is none, or its file is damaged.
    """
    content = read_json(path / SWEEP_FILE)
    if content.get("version", VERSION) != VERSION:
        raise LauncherError(
            f"{path}: its sweep.json has version {content['version']}, this launcher reads {VERSION}"
        )
    try:
        return Sweep(
            path=path,
            recipe=content["recipe"],
            points=tuple(_stored(path, item) for item in content["points"]),
            refused=tuple((item["label"], item["reasons"][0]) for item in content["refused"]),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise LauncherError(f"{path} holds no sweep.json that can be read") from error


def stored_sweeps(root: str) -> list[Path]:
    """The sweeps below a folder, the newest last."""
    folder = absolute(root)
    found = [path for path in folder.iterdir() if (path / SWEEP_FILE).is_file()] if folder.is_dir() else []
    return sorted(found, key=lambda path: ((path / SWEEP_FILE).stat().st_mtime_ns, path.name))


def find_sweep(word: str = "") -> Sweep:
    """The sweep at a path, of a name below runs/, or the newest of a recipe; without a word the newest.

    Raises:
        LauncherError: when there is none.
    """
    sweeps = stored_sweeps(DEFAULT_ROOT)
    path = sweep_at(word) if word else next(reversed(sweeps), None)
    if path:
        return read_sweep(path)
    of_recipe = [sweep for sweep in map(read_sweep, sweeps) if sweep.recipe == word]
    if of_recipe:
        return of_recipe[-1]
    if not sweeps:
        raise LauncherError(f"there is no sweep in {DEFAULT_ROOT}. trireme sweep run makes one.")
    raise LauncherError(f"no sweep at {word}. {did_you_mean(word, [path.name for path in sweeps])}")


def ready_again(directory: RunDirectory, num_steps: int) -> bool:
    """Moves aside what the last attempt of a run left; whether there is a checkpoint to go on from.

    Raises:
        JobError: when the run is still going.
    """
    check_idle(directory)
    saved = saved_steps(directory.path)
    resumes = bool(saved) and saved[-1] < num_steps
    kept = ("metrics", "checkpoints") if resumes else ()
    for name in (*SUBFOLDERS, "checkpoints"):
        folder = directory.path / name
        if name not in kept and folder.is_dir() and any(folder.iterdir()):
            move_aside(folder)
    for name in SUBFOLDERS:
        (directory.path / name).mkdir(exist_ok=True)
    return resumes


def _named_folder(given: str) -> Path:
    path = absolute(given)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        fix = "Give another run.dir."
        if (path / SWEEP_FILE).is_file():
            fix = f"Give another run.dir, or go on with: trireme sweep retry {given}"
        rule = "exists, and no sweep is written over another"
        raise ConfigError([Fault("run.dir", given, rule, fix)]) from None
    return path


def _stored(path: Path, item: dict[str, Any]) -> StoredPoint:
    return StoredPoint(
        label=item["label"],
        overrides=tuple(item["overrides"]),
        directory=RunDirectory(path / item["folder"]),
    )
