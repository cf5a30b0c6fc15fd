"""Who may write in a run directory: the lock of it, taken, refused, or taken over from whoever is gone."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from launcher.base import lock, registry
from launcher.base.errors import JobError, LauncherError
from launcher.base.files import read_json
from launcher.base.processes import birth_of, command_line, is_called_with, parent_of, system_id
from launcher.contract.executor import Executor
from launcher.contract.job import JobHandle, process_name, rank_words

HANDLE = "handle.json"
"""File of a run directory with the job's id and executor, for a submitted run."""
_ASK_S = 0.2
_MOST_WORDS = 4
"""Those in which a command line names its program: an interpreter and its options come first."""
Say = Callable[[str], None]
"""What tells somebody that is waited."""


def claimed(path: Path, say: Say) -> lock.Lease:
    """The lock of a folder, for this process to write there. Of several that claim it at once one gets it.

    Raises:
        JobError: naming who has it; or ranks of an earlier start, which have not ended.
    """
    while (lease := lock.create(path)) is None:
        data = lock.read(path)
        if data is None or not _is_gone(path, data, say):
            continue
        if (lease := lock.take_over(path, data)) is not None:
            break
        time.sleep(_ASK_S)  # another one does so
    return lease


def _is_gone(path: Path, data: bytes, say: Say) -> bool:
    """Whether the holder of a lock can write no more; False where it has to be looked at again.

    Raises:
        JobError: when it can.
    """
    holder = lock.holder_of(data)
    if holder.job:
        is_active = _is_active(path, holder.job)
        if is_active:
            raise JobError(job_text(path, holder.job))
        if is_active is False:
            return True
    elif holder.is_here:
        if holder.is_alive:
            raise JobError(held_text(path, str(holder)))
        _wait_for_ranks(path, say)
        return True
    elif not holder.token:  # it may just be written
        time.sleep(_ASK_S)
        if lock.read(path) != data:
            return False
    say(f"{path.name}: waiting {lock.STILL_S:g} s to see whether {holder} still runs")
    if not lock.stands_still(path, data):
        raise JobError(held_text(path, str(holder)))
    return True


def held_text(path: Path, holder: str) -> str:
    """What is said to whoever wants a folder that somebody has."""
    quoted = shlex.quote(str(path))
    return (
        f"{path} is in use by {holder}, which has not ended. "
        f"trireme wait {quoted} follows it, trireme cancel {quoted} ends it; start again after that."
    )


def job_text(path: Path, job: str) -> str:
    """The same where a scheduler has the run."""
    quoted = shlex.quote(str(path))
    return (
        f"{path} belongs to job {job}, which has not ended as far as is known. "
        f"trireme status {quoted} asks again; trireme cancel {quoted} ends it."
    )


def ranks_left(path: Path) -> dict[int, int]:
    """The processes, by rank, of the last start of a run that are of this system and have not ended: such a
    one may have been stopped when its launcher was killed.

    The files may be another user's: a process that they name counts where its own command line says that it
    is a rank of this run.
    """
    left = {}
    for file in path.glob(process_name(0).replace("0", "*")):
        known = read_json(file)
        rank, pid, birth = (known.get(name) for name in ("rank", "pid", "birth"))
        if not isinstance(rank, int) or not isinstance(pid, int) or known.get("system") != system_id():
            continue
        if birth_of(pid) == birth != "" and is_called_with(pid, rank_words(str(path))):
            left[rank] = pid
    return dict(sorted(left.items()))


def is_launcher(pid: int, path: Path) -> bool:
    """Whether a process that a run's files name, which may be another user's, follows that run: it has
    started what has started its ranks, or it was called as this program."""
    if any(parent_of(parent_of(rank)) == pid for rank in ranks_left(path).values()):
        return True
    python, *words = [Path(word).name for word in command_line(pid)[:_MOST_WORDS]] or [""]
    return python.startswith("python") and bool({"trireme", "launcher"} & {*words})


def left_text(ranks: dict[int, int]) -> str:
    """Ranks that are left, with their processes."""
    return ", ".join(f"rank {rank} (process {pid})" for rank, pid in ranks.items())


def _wait_for_ranks(path: Path, say: Say) -> None:
    """Waits a while for ranks whose launcher was killed: they are told to end.

    Raises:
        JobError: when some do not.
    """
    if not (left := ranks_left(path)):
        return
    say(f"{path.name}: waiting {lock.STILL_S:g} s for {left_text(left)} of an earlier start to end")
    until = time.monotonic() + lock.STILL_S
    while left := ranks_left(path):
        if time.monotonic() > until:
            raise JobError(
                f"{path} is in use by {left_text(left)} of a start whose launcher is gone. "
                f"trireme cancel {shlex.quote(str(path))} ends them; start again after that."
            )
        time.sleep(_ASK_S)


def _is_active(path: Path, job: str) -> bool | None:
    """Whether a job has not ended, by what its scheduler says now; None: it does not say."""
    try:
        executor = registry.load(Executor, str(read_json(path / HANDLE).get("executor", "")))
        return executor.state(JobHandle(id=job, run_dir=str(path))).phase in ("pending", "running")
    except LauncherError:
        return None
