"""``trireme logs``: what a run has printed."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from launcher.app.lookup import one_run
from launcher.base.errors import LauncherError
from launcher.base.files import read_json
from launcher.base.redaction import escaped
from launcher.base.units import counted
from launcher.contract.job import EXECUTOR_LOG, log_name
from launcher.runs.state import current_state
from launcher.runs.status import ACTIVE
from launcher.runs.store import RunDirectory
from launcher.runs.tail import Tail

_READ_INTERVAL_S = 0.2
_ASK_INTERVAL_S = 2.0
_MAX_RANKS = 16


def logs(given: Namespace) -> int:
    """Prints the output of a run: what started its ranks, then what each rank printed, or with --rank only
    that of one rank. Of many ranks the first 16 are printed.

    Examples:
      trireme logs -f runs/quickstart-20250102-030405
      trireme logs runs/quickstart-20250102-030405 --rank 3
    """
    directory = one_run(given.names, "logs")
    rank = _rank(given.rank, directory) if given.rank else None
    tails: dict[Path, Tail] = {}
    if given.follow:
        _follow(directory, rank, tails)
        return 0
    if not any(path.is_file() for path, _ in _files(directory, rank)):
        state, (first, _) = current_state(directory), next(_files(directory, rank))
        raise LauncherError(f"{first} is not there: the run is {state.phase}. {state.reason}".strip())
    _print_new(directory, rank, tails, to_end=True)
    return 0


def _rank(word: str, directory: RunDirectory) -> int:
    if not word.isdecimal():
        raise LauncherError(f"--rank={word}: must be a whole number of at least 0.")
    rank, num_ranks = int(word), read_json(directory.job).get("world_size")
    (log, _) = next(_files(directory, rank))
    if isinstance(num_ranks, int) and rank >= num_ranks and not log.is_file():
        raise LauncherError(
            f"--rank={word}: the run has {counted(num_ranks, 'rank')}, of which 0 is the first."
        )
    return rank


def _files(directory: RunDirectory, rank: int | None) -> Iterator[tuple[Path, str]]:
    """The files to print, each with the prefix of its lines."""
    if rank is not None:
        yield directory.path / log_name(rank), ""
        return
    yield directory.path / EXECUTOR_LOG, ""
    names = (path.stem.removeprefix("rank-") for path in (directory.path / "logs").glob("rank-*.log"))
    ranks = sorted(int(name) for name in names if name.isdecimal())
    yield from ((directory.path / log_name(rank), f"rank {rank}: ") for rank in ranks[:_MAX_RANKS])


def _print_new(directory: RunDirectory, rank: int | None, tails: dict[Path, Tail], *, to_end: bool) -> None:
    for path, prefix in _files(directory, rank):
        new = tails.setdefault(path, Tail(path)).read(to_end=to_end).decode(errors="replace")
        if sys.stdout.isatty():  # what a rank prints must not steer the terminal
            new = escaped(new.replace("\r\n", "\n").replace("\r", "\n"))
        sys.stdout.writelines(f"{prefix}{line}" for line in new.splitlines(keepends=True))
    sys.stdout.flush()


def _follow(directory: RunDirectory, rank: int | None, tails: dict[Path, Tail]) -> None:
    """Prints what is there and what comes, until the run has ended and all of it is printed."""
    asked, has_ended = 0.0, False
    while not has_ended:
        if time.monotonic() - asked > _ASK_INTERVAL_S:
            has_ended, asked = current_state(directory).phase not in ACTIVE, time.monotonic()
        _print_new(directory, rank, tails, to_end=has_ended)
        if not has_ended:
            time.sleep(_READ_INTERVAL_S)
