"""The lock of a folder on a file system that hosts share: one file in it, of whoever may write there.

The holder raises a counter in the file. Whether a process of this system is alive is known. With any other,
whoever wants the folder looks whether the counter stands still, by a monotonic clock of its own: clocks of
hosts are never compared, and the file system is asked for no lock. A holder looks whether the file is still
its own before it writes: one that was stopped, or was cut off, finds that of another there, or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from secrets import token_hex

from launcher.base.errors import LauncherError
from launcher.base.files import json_object, naming, read_regular
from launcher.base.processes import birth_of, system_id

FILE = "lock"
"""Name of the file."""
INTERVAL_S = 3.0
"""Time between two looks of a holder, at which it raises a counter that stands still."""
STILL_S = 15.0
"""How long a counter has to stand still until its holder counts as gone."""
_MAX_AGE = 1.5
"""Age up to which a look tells whether the lock is still held, in intervals: far below the time after
which it is lost. The last look is older only after the process was stopped, or where a read takes long."""
_PATIENCE_S = 2.0
"""How long a file that is not there, or cannot be read, is looked for: it may just be replaced."""
_ASK_S = 0.2
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that also goes on while the machine sleeps."""


class LostLockError(LauncherError):
    """The folder is no longer this process's to write in."""


OnLoss = Callable[[LostLockError], None]
"""What is done at once where a lock is found lost."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The content of the file. The counter comes last: it alone changes, and keeps its length."""

    token: str
    """Random; who has it may write."""
    host: str = ""
    system: str = ""
    """`system_id` of the process."""
    pid: int = 0
    birth: str = ""
    """`birth_of` the process."""
    job: str = ""
    """The id of the job that holds it; empty: the process does."""
    since: str = ""
    """Time at which it was taken, ISO 8601; only shown."""
    beat: str = "0" * 16
    """The counter."""

    @property
    def is_here(self) -> bool:
        """Whether its process is one of this system."""
        return (self.host, self.system) == (socket.gethostname(), system_id())

    @property
    def is_alive(self) -> bool:
        """Whether its process, one of this system, has not ended."""
        return birth_of(self.pid) == self.birth != ""

    def __str__(self) -> str:
        who = f"job {self.job}" if self.job else f"process {self.pid}"
        return f"{who} on {self.host} since {self.since}" if self.host else "somebody who is not named"


def read(folder: Path, name: str = FILE) -> bytes | None:
    """The file of a folder, None where there is none.

    Raises:
        OSError: when it cannot be read.
    """
    with suppress(FileNotFoundError):  # opened anew, a file is as another host has left it, over NFS, too
        return read_regular(folder / name)
    return None


def holder_of(data: bytes) -> Holder:
    """Whom a file names; one that is just being written, or damaged, names nobody."""
    found = json_object(data) or {}
    texts = {name: found.get(name) for name in ("token", "host", "system", "birth", "job", "since", "beat")}
    pid = found.get("pid")
    if not isinstance(pid, int) or not all(isinstance(text, str) for text in texts.values()):
        return Holder(token="")
    return Holder(pid=pid, **{name: str(text) for name, text in texts.items()})


def create(folder: Path) -> Lease | None:
    """Takes the lock of a folder for this process; None where somebody has it. Of several that call this at
    once, on whatever hosts, one gets it.

    Raises:
        OSError: when it cannot be written.
    """
    token = place(folder)
    return Lease(folder, token) if token else None


def place(folder: Path) -> str:
    """Writes the file for this process; its token, or nothing where somebody has the lock."""
    holder = _this_process()
    return holder.token if _write_new(folder / FILE, _text(holder)) else ""


def take_over(folder: Path, data: bytes) -> Lease | None:
    """Takes the lock from a holder that is gone, whose file holds ``data``; None where another one does so,
    or has done so. Of several that call this at once, on whatever hosts, one gets it.

    Whoever makes the file ``lock.after-TOKEN`` may replace the lock with that token, and does so with that
    very file. One that ended in between is itself taken over from, by ``lock.after-`` its own token.

    Raises:
        OSError: when it cannot be written.
    """
    mine, before = _this_process(), holder_of(data).token
    key, left = before or hashlib.sha256(data).hexdigest()[:32], []
    while not _write_new(claim := folder / f"{FILE}.after-{key}", _text(mine)):
        if (found := read(folder, claim.name)) is None:
            continue
        other = holder_of(found)
        if other.is_alive if other.is_here else not stands_still(folder, found, claim.name):
            return None
        left.append(claim)
        key = other.token
    if _token_in(folder) != before:  # it was taken over before
        claim.unlink()
        return None
    claim.replace(folder / FILE)
    for path in left:
        path.unlink(missing_ok=True)
    return Lease(folder, mine.token)


def stands_still(folder: Path, data: bytes, name: str = FILE) -> bool:
    """Whether a file stays as it is for `STILL_S`, or goes; False as soon as it changes.

    Raises:
        OSError: when it cannot be read.
    """
    until = time.monotonic() + STILL_S
    while time.monotonic() < until:
        if (now := read(folder, name)) != data:
            return now is None
        time.sleep(_ASK_S)
    return True


class Lease:
    """The lock of a folder, held. A thread raises the counter where nobody else does, until `release`, or
    until this object or its process is gone."""

    def __init__(self, folder: Path, token: str, on_loss: OnLoss | None = None) -> None:
        """``on_loss``: called, in whatever thread, where a process that holds it together with the one that
        has taken it finds it lost; None: this is the one that has taken it."""
        self.token = token
        watch = self._watch = _Watch(folder, token, on_loss)
        self._release = weakref.finalize(self, *((_remove, watch) if on_loss is None else (watch.ended.set,)))
        threading.Thread(target=self._watch.run, name="lock", daemon=True).start()

    def check(self, *, anew: bool = False) -> None:
        """Finds out whether the lock is still held, or was given back, by what the thread has seen.

        The file itself is looked at where it is to be ``anew``, or the thread has not looked when it should
        have.

        Raises:
            LostLockError: when it is not.
        """
        self._watch.check(0.0 if anew else _MAX_AGE * INTERVAL_S)

    def release(self) -> None:
        """Gives the lock back where this process has taken it, and looks at it no more."""
        self._release()


class _Watch:
    """What a lease knows, apart from it, so that a lease that nobody has is given back."""

    def __init__(self, folder: Path, token: str, on_loss: OnLoss | None) -> None:
        self.folder, self.token, self._on_loss = folder, token, on_loss
        self.ended = threading.Event()
        self._loss: LostLockError | None = None
        self._looked_at = float("-inf")

    def run(self) -> None:
        """The thread: raises a counter that nobody has raised since the last look."""
        before = None
        with suppress(LostLockError):
            while not self.ended.wait(INTERVAL_S):
                data = self._look()
                before = _raised(self.folder, data) if data == before else data

    def check(self, max_age_s: float) -> None:
        """As that of the lease."""
        if self._loss is not None:
            raise self._loss
        if not self.ended.is_set() and time.clock_gettime(_CLOCK) - self._looked_at > max_age_s:
            self._look()

    def _look(self) -> bytes:
        """The file, which is ours."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            looked_at = time.clock_gettime(_CLOCK)
            try:
                data = read(self.folder)
                why = "its lock is gone"
            except OSError as error:
                data, why = None, f"its lock cannot be read: {error.strerror}"
            if self.ended.is_set():
                return b""
            if data is not None and holder_of(data).token == self.token:
                self._looked_at = looked_at
                return data
            if data is not None and holder_of(data).token:
                why = f"it was taken over by {holder_of(data)}"
                break
            if time.monotonic() > until:
                why += ". The folder was moved or removed, or its file system is no longer mounted"
                break
            time.sleep(_ASK_S)
        self._loss = LostLockError(
            f"{self.folder} on {socket.gethostname()} is no longer the folder that this process held: {why}. "
            "Nothing more is written there."
        )
        if self._on_loss is not None:
            self._on_loss(self._loss)
        raise self._loss


def _this_process() -> Holder:
    return Holder(
        token=token_hex(16),
        host=socket.gethostname(),
        system=system_id(),
        pid=os.getpid(),
        birth=birth_of(os.getpid()),
        since=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def _remove(watch: _Watch) -> None:
    watch.ended.set()
    with suppress(OSError):
        if _token_in(watch.folder) == watch.token:
            (watch.folder / FILE).unlink()


def _token_in(folder: Path) -> str | None:
    data = read(folder)
    return None if data is None else holder_of(data).token


def _text(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode() + b"\n"


def _raised(folder: Path, data: bytes) -> bytes:
    """Raises the counter in the file, which holds ``data``; what it holds then. It is written in place: where
    another one has just replaced the file, that of the other is not touched."""
    holder = holder_of(data)
    number = int(holder.beat) + 1 if holder.beat.isdecimal() else 0
    text = _text(replace(holder, beat=f"{number:016}"))
    with suppress(OSError), (folder / FILE).open("r+b") as file:
        if holder_of(file.read()).token == holder.token:
            file.seek(0)
            file.write(text)
            file.truncate()
    return text


def _write_new(path: Path, data: bytes) -> bool:
    """Writes a file that only its owner can open; False where there is one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    try:
        with naming(path), open(descriptor, "wb") as file:
            file.write(data)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True
