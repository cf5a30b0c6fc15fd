"""``trireme logs``: what a run has printed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from launcher.cli.runs import one_run
from launcher.cli.words import split_flags
from launcher.errors import LauncherError
from launcher.jobs.handle import standing
from launcher.jobs.script import EXECUTOR_LOG
from launcher.jobs.store import ACTIVE, RunDirectory

HELP = """\
trireme logs [-f] RUN [--rank N]

Prints the output of a run: what started its ranks, or with --rank what one rank printed.

  -f, --follow  go on printing until the run has ended
  --rank N      the output of rank N

  trireme logs -f runs/quickstart-20250102-030405
  trireme logs runs/quickstart-20250102-030405 --rank 3
"""
_READ_INTERVAL_S = 0.2
_ASK_INTERVAL_S = 2.0


def run(words: list[str]) -> int:
    """Prints the log; returns the exit code.

    Raises:
        LauncherError: when there is no such run, rank or output.
    """
    rest, flags = split_flags(
        ["--follow" if word == "-f" else word for word in words], {"follow": False, "rank": True}
    )
    directory = one_run(rest, "logs")
    log = _log(directory, str(flags["rank"]) if flags["rank"] else None)
    if flags["follow"]:
        _follow(directory, log)
    elif log.is_file():
        sys.stdout.write(log.read_text(encoding="utf-8", errors="replace"))
    else:
        state = standing(directory)
        raise LauncherError(f"{log} is not there: the run is {state.phase}. {state.reason}".strip())
    return 0


def _log(directory: RunDirectory, rank: str | None) -> Path:
    if rank is None:
        return directory.path / EXECUTOR_LOG
    if not rank.isdecimal():
        raise LauncherError(f"--rank={rank}: must be a whole number of at least 0.")
    return directory.path / "logs" / f"rank-{int(rank)}.log"


def _follow(directory: RunDirectory, log: Path) -> None:
    """Prints what is there and what comes, until the run has ended and all of it is printed."""
    position, asked, has_ended = 0, 0.0, False
    while True:
        if time.monotonic() - asked > _ASK_INTERVAL_S:
            has_ended, asked = standing(directory).phase not in ACTIVE, time.monotonic()
        if log.is_file():
            with log.open("rb") as file:
                file.seek(position)
                new = file.read()
            position += len(new)
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()
        if has_ended:
            return
        time.sleep(_READ_INTERVAL_S)
