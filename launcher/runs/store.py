"""Run directories: created once, never overwritten, readable without this program.

RUN/plan.json        what the ranks do          RUN/logs/rank-N.log          each rank's output
RUN/job.json         how they were started      RUN/metrics/rank-NNNNN.jsonl each rank's measurements
RUN/config.yaml      every setting, composed    RUN/exit/rank-N.*            why a rank failed
RUN/job.sh           the command, to read       RUN/status.json              the state of the run
RUN/handle.json      the submitted job          RUN/source/                  its copy of the code
RUN/inputs.json      digests of data and code that it was started with
RUN/init_config.json that of train.init_from
RUN/metrics/sums/    their sums, window by window, and RUN/metrics/whole/ the newest windows' steps
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from launcher.base.errors import ConfigError, Fault, JobError
from launcher.base.files import read_json, safe_name, write_whole
from launcher.base.resources import home_folder
from launcher.contract.config import RunConfig
from launcher.contract.job import CHECKPOINTS, JobState, checkpoint_name, records_name
from launcher.runs.status import BrokenStatus, RunPhase, Status, read_status, status_now
from launcher.typed.read import plain

SUBFOLDERS = ("logs", "metrics", "exit")
START_FOLDERS = ("logs", "exit")
"""Those of one start of the ranks; moved aside before the next."""
SWEEP_FILE = "sweep.json"
"""In the directory of a sweep, beside its run directories."""


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path
    """Absolute."""

    @property
    def plan(self) -> Path:
        """What the ranks do."""
        return self.path / "plan.json"

    @property
    def job(self) -> Path:
        """How the run was started, and what its baseline is."""
        return self.path / "job.json"

    @property
    def handle(self) -> Path:
        """The job's id and executor, for a submitted run."""
        return self.path / "handle.json"

    @property
    def status_file(self) -> Path:
        """The state of the run."""
        return self.path / "status.json"

    def records(self, rank: int) -> Path:
        """What a rank measured."""
        return self.path / records_name(rank)

    def write(self, name: str, text: str) -> None:
        """Writes a file whole or not at all."""
        write_whole(self.path / name, text)

    def write_state(self, state: JobState) -> None:
        """Records the state of the run's job."""
        details = {"exit_code": state.exit_code, "reason": state.reason, "rank": state.rank}
        self.write_status(state.phase, since_s=state.since_s, **details)

    def write_status(self, phase: RunPhase, *, since_s: float | None = None, **details: Any) -> None:
        """Records a phase of the run, by default since now; keeps the time of its start."""
        status = replace(status_now(phase, self.status().started, since_s), **details)
        self.write(self.status_file.name, json.dumps(plain(status), indent=1) + "\n")

    def status(self) -> Status:
        """What was recorded last."""
        return read_status(self.status_file)


def new_directory(run: RunConfig, name: str, *, overwrite: bool = False) -> RunDirectory:
    """Creates the directory of a new run; with ``overwrite`` an existing ``run.dir`` is moved aside.

    Raises:
        ConfigError: as `new_folder`, and when ``run.dir`` may not be moved aside.
        JobError: when the run to be moved aside has not ended.
    """
    fix = "Give another run.dir."
    path = absolute(run.dir or "")
    if run.dir and os.path.lexists(path):
        not_movable = _why_not_movable(path)
        if overwrite:
            check_idle(RunDirectory(path))
        if overwrite and not_movable:
            raise ConfigError([Fault("run.dir", run.dir, f"{not_movable}, and is not moved aside", fix)])
        if not not_movable:
            fix = "Give --resume to continue it, --overwrite to move it aside, or another run.dir."
    return RunDirectory(new_folder(run, name, SUBFOLDERS, overwrite=overwrite, fix=fix))


def new_folder(
    run: RunConfig,
    name: str,
    subfolders: Sequence[str],
    *,
    kind: str = "run",
    overwrite: bool = False,
    fix: str,
) -> Path:
    """Creates ``run.dir``, or a folder below ``run.root``, with subfolders; of several concurrent callers
    exactly one gets it. ``fix``: what to do where ``run.dir`` exists.

    Raises:
        ConfigError: when ``run.dir`` exists, or the folder cannot be created.
    """
    try:
        path = (
            _named_folder(run.dir, kind, fix, overwrite=overwrite) if run.dir else _numbered_folder(run, name)
        )
        for folder in subfolders:
            (path / folder).mkdir()
    except OSError as error:
        setting, given = ("run.dir", run.dir) if run.dir else ("run.root", run.root)
        rule, fix = f"cannot be created: {error.strerror}", f"Set {setting} to a writable folder."
        raise ConfigError([Fault(setting, given, rule, fix)]) from error
    return path


def fresh_folders(directory: RunDirectory, *names: str) -> None:
    """Moves aside these folders of the last start of the ranks, and makes new ones."""
    for name in names:
        folder = directory.path / name
        if folder.is_dir():
            move_aside(folder)
        folder.mkdir()


def expected_path(run: RunConfig, name: str) -> Path:
    """The directory that a run started now would get; a number is appended where it exists."""
    return absolute(run.dir) if run.dir else absolute(run.root) / f"{safe_name(name)}-{_stamp()}"


def saved_steps(run_dir: Path) -> list[int]:
    """The steps after which the run has a complete checkpoint, ascending."""
    names = [folder.name for folder in (run_dir / CHECKPOINTS).glob("step-*")]
    steps = [int(name[5:]) for name in names if name[5:].isdecimal()]
    return sorted(step for step in steps if checkpoint_name(step) in names)


def absolute(path: str) -> Path:
    """The absolute path of a setting: ``~`` is the home folder, relative paths start here."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _named_folder(given: str, kind: str, fix: str, *, overwrite: bool) -> Path:
    path = absolute(given)
    path.parent.mkdir(parents=True, exist_ok=True)
    if overwrite and os.path.lexists(path):
        move_aside(path)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        rule = f"already exists; a {kind} never overwrites a directory"
        raise ConfigError([Fault("run.dir", given, rule, fix)]) from None
    return path


def _why_not_movable(path: Path) -> str:
    """Why a path may not be moved aside; empty for a run directory and for one without files."""
    for folder, name in ((Path.cwd(), "the current folder"), (home_folder(), "your home folder")):
        if path.resolve() in (folder.resolve(), *folder.resolve().parents):
            return f"is {name} or holds it"
    if not path.is_dir():
        return "is no directory"
    run = RunDirectory(path)
    is_run = any(os.path.isfile(file) for file in (run.plan, run.job))
    is_run = is_run and all((path / name).is_dir() for name in SUBFOLDERS)
    if not is_run and any(files for _, _, files in os.walk(path)):
        return "holds files and is no run directory (which has plan.json, logs, metrics and exit)"
    return ""


def _numbered_folder(run: RunConfig, name: str) -> Path:
    """Creates a folder below ``run.root`` named after the time; each concurrent caller gets its own."""
    first = expected_path(run, name)
    first.parent.mkdir(parents=True, exist_ok=True)
    for path in _numbered(first):
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise AssertionError("numbers do not end")


def move_aside(path: Path) -> Path:
    """Renames to ``<path>.<time>``, with a number where that exists."""
    names = _numbered(path.with_name(f"{path.name}.{_stamp()}"))
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def _numbered(path: Path) -> Iterator[Path]:
    """The path, then the same with a number behind it."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


def check_idle(directory: RunDirectory) -> None:
    """Refuses a run that has not ended.

    Raises:
        JobError: naming its job or process, or what to do where neither is known.
    """
    status = directory.status()
    if isinstance(status, BrokenStatus):
        raise JobError(
            f"{directory.path}: it is not known whether the run has ended. {status.reason.rstrip('.')}. "
            f"See that no process and no job has it, then remove {directory.status_file}."
        )
    if status.is_active and (job := read_json(directory.handle).get("id")):
        raise JobError(
            f"{directory.path} belongs to job {job}, which has not ended as far as is known. "
            f"trireme status {directory.path} asks again; trireme cancel {directory.path} ends it."
        )
    if status.is_active and status.is_followed:
        raise JobError(f"{directory.path} is in use by a running process (process {status.pid})")


def _stamp() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")
