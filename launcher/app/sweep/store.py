"""The directory of a sweep: made once, with a run directory for every point that can run.

SWEEP/sweep.json   which points there are     SWEEP/NN-pp_2/   the run of a point, as any other
SWEEP/tasks/N      leads to the run of point N, for schedulers that know their tasks by number
SWEEP/source/      the code of all points, where they were submitted

The state of a point is read from its run directory, and kept nowhere else.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.app.lifecycle import share_run
from launcher.app.lookup import DEFAULT_ROOT, sweep_at
from launcher.app.sweep.point import PlannedSweep, Point
from launcher.base.errors import LauncherError, did_you_mean
from launcher.base.files import read_json
from launcher.runs.store import SWEEP_FILE, RunDirectory, absolute, new_folder

VERSION = 1
"""Of sweep.json; raised when a field changes its meaning."""
TASKS = "tasks"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep's directory, read."""

    path: Path
    """Absolute."""
    recipe: str
    points: tuple[Point, ...]
    refused: tuple[tuple[str, str], ...]
    """Label and first reason of the points that could not run."""


def make_sweep(planned: PlannedSweep) -> Sweep:
    """Makes the directory: run.dir, or one below run.root that is named by the time. Holds no runs yet.

    Raises:
        ConfigError: when run.dir exists, or cannot be made.
    """
    config, count = planned.points[0].plan.config, len(planned.points)
    fix = "Give another run.dir."
    if config.run.dir and (absolute(config.run.dir) / SWEEP_FILE).is_file():
        fix = f"Give another run.dir, or go on with: trireme sweep retry {shlex.quote(config.run.dir)}"
    directory = new_folder(config.run, f"{config.name}-sweep", (TASKS,), kind="sweep", fix=fix)
    path = directory.path
    share_run(path, config.site)
    for point in planned.points:
        (path / TASKS / str(point.index)).symlink_to(Path("..") / point.folder(count))
    content = {
        "version": VERSION,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "recipe": planned.recipe,
        "words": list(planned.words),
        "points": [
            {"folder": point.folder(count), "label": point.label, "overrides": list(point.overrides)}
            for point in planned.points
        ],
        "refused": [
            {
                "label": point.label,
                "overrides": list(point.overrides),
                "reasons": [str(fault) for fault in point.faults],
            }
            for point in planned.refused
        ],
    }
    directory.write(SWEEP_FILE, json.dumps(content, indent=1) + "\n")
    directory.release()
    return Sweep(
        path=path,
        recipe=planned.recipe,
        points=tuple(point.placed(path, count) for point in planned.points),
        refused=tuple((point.label, str(point.faults[0])) for point in planned.refused),
    )


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
            points=tuple(_stored(path, *numbered) for numbered in enumerate(content["points"])),
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


def _stored(path: Path, index: int, item: dict[str, Any]) -> Point:
    return Point(
        label=item["label"],
        overrides=tuple(item["overrides"]),
        stored=RunDirectory(path / item["folder"]),
        index=index,
    )
