"""Run directories: made once, never written over, readable without this program.

RUN/plan.json        what the ranks do          RUN/logs/rank-N.log          each rank's output
RUN/job.json         how they were started      RUN/metrics/rank-NNNNN.jsonl what each measured
RUN/config.yaml      every setting, composed    RUN/exit/rank-N.*            how a rank failed
RUN/job.sh           the command, to read       RUN/status.json              how the run stands
RUN/handle.json      the job, where submitted   RUN/source/                  the code, where submitted
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

from launcher.base.errors import ConfigError, Fault, JobError
from launcher.base.files import safe_name, write_whole
from launcher.contract.config import RunConfig
from launcher.contract.job import JobState, Phase

RunPhase = Phase | Literal["prepared"]
"""How a run stands: before its job is there, it is prepared."""
ACTIVE = ("prepared", "pending", "running")
"""Phases that a run is in before it has ended."""
SUBFOLDERS = ("logs", "metrics", "exit")
SWEEP_FILE = "sweep.json"
"""What the directory of a sweep holds beside the run directories in it."""
_SAVED = re.compile(r"step-([0-9]{8})")
"""Name of the folder of a whole checkpoint."""


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path
    """Absolute."""

    @property
    def plan(self) -> Path:
        """The contract with the ranks."""
        return self.path / "plan.json"

    @property
    def job(self) -> Path:
        """How the run was started, and what its baseline is."""
        return self.path / "job.json"

    @property
    def handle(self) -> Path:
        """Which job it is, where a scheduler has it."""
        return self.path / "handle.json"

    @property
    def status_file(self) -> Path:
        """How the run stands."""
        return self.path / "status.json"

    def records(self, rank: int) -> Path:
        """What a rank measured."""
        return self.path / "metrics" / f"rank-{rank:05d}.jsonl"

    def write(self, name: str, text: str) -> None:
        """Writes a file whole or not at all."""
        write_whole(self.path / name, text)

    def write_status(self, phase: RunPhase, exit_code: int | None = None) -> None:
        """Records how the run stands; keeps when it started."""
        self._write_status(phase, exit_code=exit_code, reason="", rank=None)

    def write_state(self, state: JobState) -> None:
        """Records how the job of the run stands."""
        details = {"exit_code": state.exit_code, "reason": state.reason, "rank": state.rank}
        self._write_status(state.phase, state.since_s, **details)

    def state(self) -> JobState:
        """How the job stood when that was recorded last."""
        status = read_json(self.status_file)
        phase = status.get("phase", "failed")
        return JobState(
            phase="pending" if phase == "prepared" else phase,
            exit_code=status.get("exit_code"),
            reason=status.get("reason", "" if status else "it left no status.json"),
            rank=status.get("rank"),
        )

    def _write_status(self, phase: RunPhase, since_s: float | None = None, **details: Any) -> None:
        now, changed = (
            datetime.fromtimestamp(time_s).astimezone().isoformat(timespec="microseconds")
            for time_s in (time.time(), time.time() if since_s is None else since_s)
        )
        status = {
            "phase": phase,
            **details,
            "started": read_json(self.status_file).get("started", now),
            "changed": changed,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
        }
        self.write(self.status_file.name, json.dumps(status, indent=1) + "\n")


def new_directory(run: RunConfig, name: str, *, overwrite: bool = False) -> RunDirectory:
    """Makes the directory of a new run; exactly one of several callers at once gets it.

    Raises:
        ConfigError: when ``run.dir`` exists and is not to be moved aside, or cannot be made.
    """
    try:
        path = _make_named(run, overwrite=overwrite) if run.dir else numbered_folder(run, name)
        for folder in SUBFOLDERS:
            (path / folder).mkdir()
    except OSError as error:
        setting, given = ("run.dir", run.dir) if run.dir else ("run.root", run.root)
        fault = Fault(
            setting, given, f"cannot be made: {error.strerror}", f"Set {setting} to a writable place."
        )
        raise ConfigError([fault]) from error
    return RunDirectory(path)


def expected_path(run: RunConfig, name: str) -> Path:
    """Where the directory of a run that starts now would be; a number follows where that is taken."""
    return absolute(run.dir) if run.dir else absolute(run.root) / f"{safe_name(name)}-{_stamp()}"


def saved_steps(run_dir: Path) -> list[int]:
    """The steps after which the run has a whole checkpoint, ascending."""
    names = [folder.name for folder in run_dir.glob("checkpoints/*")]
    return sorted(int(found[1]) for name in names if (found := _SAVED.fullmatch(name)))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where the file is absent or cut short."""
    with suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    return {}


def absolute(path: str) -> Path:
    """A path as written in a setting: ``~`` is the home folder, relative means from here."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _make_named(run: RunConfig, *, overwrite: bool) -> Path:
    path = absolute(run.dir or "")
    why_it_stays = _why_it_stays(path) if os.path.lexists(path) else ""
    if overwrite:
        check_idle(RunDirectory(path))
    if overwrite and why_it_stays:
        fault = Fault("run.dir", run.dir, f"{why_it_stays}, and is not moved aside", "Give another run.dir.")
        raise ConfigError([fault])
    path.parent.mkdir(parents=True, exist_ok=True)
    if overwrite and os.path.lexists(path):
        move_aside(path)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        fix = "Give --resume to go on, --overwrite to move the old one aside, or another run.dir."
        fix = "Give another run.dir." if why_it_stays else fix
        raise ConfigError(
            [Fault("run.dir", run.dir, "exists, and no run is written over another", fix)]
        ) from None
    return path


def _why_it_stays(path: Path) -> str:
    """Why something is not to be moved aside; empty for a run directory and for one that holds no file."""
    for place, name in ((Path.cwd(), "the current folder"), (Path.home(), "your home folder")):
        if path.resolve() in (place.resolve(), *place.resolve().parents):
            return f"is {name} or holds it"
    if not path.is_dir():
        return "is no directory"
    holds_files = any(files for _, _, files in os.walk(path))
    if holds_files and not _is_run(RunDirectory(path)):
        return "holds files and is no run directory (which has plan.json, logs, metrics and exit)"
    return ""


def _is_run(directory: RunDirectory) -> bool:
    has_record = any(os.path.isfile(file) for file in (directory.plan, directory.job))
    return has_record and all((directory.path / name).is_dir() for name in SUBFOLDERS)


def numbered_folder(run: RunConfig, name: str) -> Path:
    """Makes a folder below ``run.root`` that is named by the time; of several callers each gets its own."""
    first = expected_path(run, name)
    first.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise AssertionError("count() does not end")


def move_aside(path: Path) -> Path:
    """Renames to ``<path>.<time>``, with a number where that is taken."""
    stem = f"{path.name}.{_stamp()}"
    for number in count(1):
        aside = path.with_name(stem if number == 1 else f"{stem}-{number}")
        if not os.path.lexists(aside):
            path.rename(aside)
            return aside
    raise AssertionError("count() does not end")


def check_idle(directory: RunDirectory) -> None:
    """Refuses a run that has not ended.

    Raises:
        JobError: with the job or the process that has it.
    """
    is_active = read_json(directory.status_file).get("phase") in ACTIVE
    if is_active and (job := read_json(directory.handle).get("id")):
        raise JobError(
            f"{directory.path} belongs to job {job}, which has not ended as far as is known. "
            f"trireme status {directory.path} asks again; trireme cancel {directory.path} ends it."
        )
    pid = follower(directory)
    if is_active and pid is not None and is_alive(pid):
        raise JobError(f"{directory.path} is in use by a run that is still going (process {pid})")


def follower(directory: RunDirectory) -> int | None:
    """The process of this machine that noted how the run stands; None where it is another machine's."""
    status = read_json(directory.status_file)
    pid = status.get("pid") if status.get("hostname") == socket.gethostname() else None
    return pid if isinstance(pid, int) else None


def is_alive(pid: int) -> bool:
    """Whether a process of this machine lives."""
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def _stamp() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")
