"""Run directories: created once, never overwritten, readable without this program.

RUN/plan.json        what the ranks do          RUN/logs/rank-N.log          each rank's output
RUN/job.json         how they were started      RUN/metrics/rank-NNNNN.jsonl each rank's measurements
RUN/config.yaml      every setting, composed    RUN/exit/rank-N.*            why a rank failed
RUN/job.sh           the command, to read       RUN/status.json              the state of the run
RUN/handle.json      the submitted job          RUN/source/                  its copy of the code
RUN/exit.*/          the same of earlier starts RUN/checkpoints.*/           set aside by --resume=STEP
RUN/lock             who may write in it now
RUN/inputs.json      digests of data and code that it was started with
RUN/init_config.json that of train.init_from    RUN/events.jsonl             starts, alarms, ends
RUN/rewinds.json     the batches passed over    RUN/notify.log               what run.notify failed with
RUN/save_times       how long before its end the ranks have to be told to save
RUN/metrics/sums/    their sums, window by window, and RUN/metrics/whole/ the newest windows' steps
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

from launcher.base import lock
from launcher.base.errors import ConfigError, Fault, JobError
from launcher.base.files import read_json, safe_name, write_whole
from launcher.base.resources import home_folder
from launcher.contract.job import CHECKPOINTS, JobState, RunConfig, checkpoint_name, records_name
from launcher.runs.claim import HANDLE, Say, claimed, held_text, job_text
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
    lease: lock.Lease | None = field(default=None, compare=False, repr=False)
    """Its lock, where this process has it."""

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
        return self.path / HANDLE

    @property
    def status_file(self) -> Path:
        """The state of the run."""
        return self.path / "status.json"

    def records(self, rank: int) -> Path:
        """What a rank measured."""
        return self.path / records_name(rank)

    def write(self, name: str, text: str) -> None:
        """Writes a file whole or not at all.

        Raises:
            LostLockError: when another one has the directory now, or it is no longer there.
        """
        self.check(anew=True)
        write_whole(self.path / name, text)

    def check(self, *, anew: bool = False) -> None:
        """Looks now and then, or ``anew``, whether this process may still write here, where it has the lock.

        Raises:
            LostLockError: when it may not.
        """
        if self.lease is not None:
            self.lease.check(anew=anew)

    def release(self) -> None:
        """Gives back the lock, where this process has it."""
        if self.lease is not None:
            self.lease.release()

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


def new_directory(
    run: RunConfig, name: str, *, overwrite: bool = False, say: Say = lambda text: None
) -> RunDirectory:
    """Creates the directory of a new run, and holds its lock; with ``overwrite`` an existing ``run.dir`` is
    moved aside. ``say``: tells that its lock is waited for.

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
        if overwrite:
            with (
                suppress(FileNotFoundError),  # another start moves it aside; one of them makes the new one
                released(hold(RunDirectory(path), say)) as old,
            ):
                check_idle(old)
                (move_aside(path) / lock.FILE).unlink()
        if not not_movable:
            fix = "Give --resume to continue it, --overwrite to move it aside, or another run.dir."
    return new_folder(run, name, SUBFOLDERS, fix=fix)


def new_folder(
    run: RunConfig, name: str, subfolders: Sequence[str], *, kind: str = "run", fix: str
) -> RunDirectory:
    """Creates ``run.dir``, or a folder below ``run.root``, with subfolders, and holds its lock; of several
    concurrent callers exactly one gets it. ``fix``: what to do where ``run.dir`` exists.

    Raises:
        ConfigError: when ``run.dir`` exists, or the folder cannot be created.
    """
    first = expected_path(run, name)
    try:
        for path in [first] if run.dir else _numbered(first):
            if lease := _made(path, subfolders):
                return RunDirectory(path, lease)
    except OSError as error:
        setting, given = ("run.dir", run.dir) if run.dir else ("run.root", run.root)
        rule, fix = f"cannot be created: {error.strerror}", f"Set {setting} to a writable folder."
        raise ConfigError([Fault(setting, given, rule, fix)]) from error
    rule = f"already exists; a {kind} never overwrites a directory"
    raise ConfigError([Fault("run.dir", run.dir, rule, fix)])


def _made(path: Path, subfolders: Sequence[str]) -> lock.Lease | None:
    """Creates a folder with its subfolders and its lock under another name, and renames it: it is there with
    all of them or not at all. None: there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".new-{token_hex(8)}")
    new.mkdir(mode=0o700)
    try:
        for folder in subfolders:
            (new / folder).mkdir()
        token = lock.place(new)
        if not os.path.lexists(path):  # an empty folder would be replaced
            new.rename(path)
            return lock.Lease(path, token)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return None


@contextmanager
def released(directory: RunDirectory, *, on_error_alone: bool = False) -> Iterator[RunDirectory]:
    """Gives back the lock of a run at the end, or where whatever is raised ends its use."""
    try:
        yield directory
    except BaseException:
        directory.release()
        raise
    if not on_error_alone:
        directory.release()


def hold(directory: RunDirectory, say: Say = lambda text: None) -> RunDirectory:
    """The directory of a run with its lock. ``say``: tells that it is waited for.

    Raises:
        JobError: naming who has it.
    """
    return replace(directory, lease=claimed(directory.path, say))


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


def is_trained(run_dir: Path) -> bool:
    """Whether the run has a complete checkpoint after the last step of its plan."""
    with suppress(LookupError, TypeError):
        return read_json(run_dir / "plan.json")["config"]["train"]["num_steps"] in saved_steps(run_dir)
    return False


def absolute(path: str) -> Path:
    """The absolute path of a setting: ``~`` is the home folder, relative paths start here."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _why_not_movable(path: Path) -> str:
    """Why a path may not be moved aside; empty for a run directory and for one without files."""
    for folder, name in ((Path.cwd(), "the current folder"), (home_folder(), "your home folder")):
        if path.resolve() in (folder.resolve(), *folder.resolve().parents):
            return f"is {name} or holds it"
    if not path.is_dir():
        return "is no directory"
    run = RunDirectory(path)
    is_run = any(os.path.isfile(file) for file in (run.plan, run.job, path / lock.FILE))
    is_run = is_run and all((path / name).is_dir() for name in SUBFOLDERS)
    if not is_run and any(files for _, _, files in os.walk(path)):
        return "holds files and is no run directory (which has plan.json, logs, metrics and exit)"
    return ""


def move_aside(path: Path) -> Path:
    """Renames to `free_name`."""
    return path.rename(free_name(path))


def free_name(path: Path) -> Path:
    """``<path>.<time>``, with a number behind it where that exists."""
    names = _numbered(path.with_name(f"{path.name}.{_stamp()}"))
    return next(name for name in names if not os.path.lexists(name))


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
        raise JobError(job_text(directory.path, job))
    if status.is_active and status.is_followed:
        holder = f"process {status.pid} on {status.hostname} since {status.started}"
        raise JobError(held_text(directory.path, holder))


def _stamp() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")
