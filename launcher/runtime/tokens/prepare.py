"""Makes the tokens of every source once, in all cores, and goes on where it was interrupted."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from launcher.base.errors import ConfigError, Fault, LauncherError
from launcher.base.files import read_json, write_whole
from launcher.base.units import format_bytes, format_count, format_duration
from launcher.contract.data.config import DataConfig
from launcher.contract.data.files import TOKENS, SourceFile, source_files
from launcher.contract.data.prepared import (
    Part,
    Prepared,
    cache_folder,
    digests_of,
    is_intact,
    is_of_others,
    is_whole,
    list_path,
    read_prepared,
)
from launcher.runtime.tokens.shards import Shard, look_at, make_shard, shards_of, start_process
from launcher.typed.read import Reading, plain, read

Tell = Callable[[str], None]
Item = TypeVar("Item")
_TOLD_EVERY_S = 5.0


def prepare(data: DataConfig, setting: str, root: str, tell: Tell, *, verify: bool = True) -> Prepared:
    """The tokens of the source that a setting names, made where they are not there. Of several processes one
    makes them and the others wait; where a file system has no locks, several do.

    ``verify``: what was made before is compared with its digests, and made again where it is damaged.

    Raises:
        ConfigError: when the source has no file, or one that cannot be read.
        LauncherError: when the folder of tokens cannot be written, or others can write in it.
    """
    files, folder = source_files(data, setting), cache_folder(data, root)
    path = list_path(data, files, folder)
    if (found := _intact(path, verify=verify, tell=tell)) is not None:
        return found
    try:
        _make_folder(folder)
        with _locked(folder):
            if (found := _intact(path, verify=verify)) is None:
                parts = _parts(data, setting, files, folder, tell)
                found = Prepared(parts=tuple(parts), digests=digests_of(folder, parts))
                write_whole(path, json.dumps(plain(found)) + "\n", is_durable=True)
                path.chmod(0o600)
    except OSError as error:
        fix = "Set data.cache_dir to a folder you can write."
        raise LauncherError(f"tokens cannot be written in {folder}: {error}. {fix}") from error
    return found


def _intact(path: Path, *, verify: bool, tell: Tell = lambda text: None) -> Prepared | None:
    if not os.path.lexists(path):
        return None
    found = read_prepared(path)
    if found is None or (verify and not is_intact(path.parent, found)):
        tell(f"{path} is damaged, or was not written by this user: it is passed over and made again")
        for part in found.parts if found else ():
            if part.is_made:
                _note_path(path.parent, part.path).unlink(missing_ok=True)
        return None
    return found


def _make_folder(folder: Path) -> None:
    """Makes the folder, which is for this user alone.

    Raises:
        OSError: when that fails, or there is something else of its name.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or not folder.is_dir() or is_of_others(folder.lstat()):
        raise PermissionError(f"{folder} is not a folder in which this user alone can write")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until no other process makes tokens in the folder, and removes what one left half written."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(folder / "lock", flags, 0o600), "wb") as lock:
        with suppress(OSError):  # two that write at once do no harm
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob("*.tmp"):
                left.unlink()
        yield


def _parts(
    data: DataConfig, setting: str, files: Sequence[SourceFile], folder: Path, tell: Tell
) -> list[Part]:
    """The parts of a source: first what is made of text, then the token files that are there."""
    texts = [file for file in files if file.kind not in TOKENS]
    tokens = [file for file in files if file.kind in TOKENS]
    shards = shards_of(data, setting, texts)
    progress = _Progress(sum(shard.size for shard in shards) + sum(file.size for file in tokens), tell)
    made = {shard.name: part for shard in shards if (part := _made(folder, shard)) is not None}
    progress.skip(sum(shard.size for shard in shards if shard.name in made))
    missing = [shard for shard in shards if shard.name not in made]
    for shard, part in in_all_cores(partial(make_shard, data, setting, folder), missing):
        write_whole(_note_path(folder, shard.name), json.dumps(plain(part)))
        made[shard.name] = part
        progress.add(shard.size, part.num_tokens)
    looked_at: dict[Path, Part] = {}
    for file, part in in_all_cores(partial(look_at, data, setting), tokens):
        looked_at[file.path] = part
        progress.add(file.size)
    return [*(made[shard.name] for shard in shards), *(looked_at[file.path] for file in tokens)]


def in_all_cores(work: Callable[[Item], Part], items: Sequence[Item]) -> Iterator[tuple[Item, Part]]:
    """Works on items, each on a core, and gives each as it is ready.

    Raises:
        ConfigError: with the faults of an item.
        LauncherError: when one of the processes is killed.
    """
    num_processes = min(len(os.sched_getaffinity(0)), len(items))
    if num_processes <= 1:
        yield from ((item, work(item)) for item in items)
        return
    context = get_context("spawn")  # not a fork: a rank has threads
    with ProcessPoolExecutor(num_processes, context, start_process, (os.getpid(),)) as pool:
        waiting = {pool.submit(_attempt, work, item): item for item in items}
        try:
            for future in as_completed(waiting):
                found = future.result()
                if not isinstance(found, Part):
                    raise ConfigError(found)
                yield waiting[future], found
        except BrokenProcessPool as error:
            rule = "a process that reads the data was ended, as the kernel does where memory runs out"
            raise LauncherError(f"{rule}. What it had made of other files is kept: try again") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _attempt(work: Callable[[Item], Part], item: Item) -> Part | tuple[Fault, ...]:
    """What came of it, or the faults: an error with them does not pass between processes."""
    try:
        return work(item)
    except ConfigError as error:
        return error.faults


def _note_path(folder: Path, name: str) -> Path:
    """What is known of a shard that is made, once all of it is there."""
    return folder / f"{name}.part"


def _made(folder: Path, shard: Shard) -> Part | None:
    """A shard that an earlier start has made."""
    part = read(Part, read_json(_note_path(folder, shard.name)), Reading())
    return part if part is not None and is_whole(folder, part) else None


class _Progress:
    """Tells how much is done, how fast, and how long the rest takes."""

    def __init__(self, num_bytes: int, tell: Tell) -> None:
        self._all, self._tell = num_bytes, tell
        self._done = self._skipped = self._num_tokens = 0
        self._began, self._told = 0.0, time.monotonic()

    def skip(self, num_bytes: int) -> None:
        """Counts what was done before."""
        self._skipped = num_bytes
        if num_bytes:
            self._tell(f"{format_bytes(num_bytes)} of {format_bytes(self._all)} are done already")

    def add(self, num_bytes: int, num_tokens: int = 0) -> None:
        """Counts what is done now. The speed is that after the first part, for which processes start."""
        now = time.monotonic()
        self._num_tokens += num_tokens
        if not self._began:
            self._began, self._skipped = now, self._skipped + num_bytes
            return
        self._done += num_bytes
        done = self._done + self._skipped
        if now - self._told < _TOLD_EVERY_S:
            return
        self._told, elapsed_s = now, max(now - self._began, 1e-6)
        left_s = (self._all - done) * elapsed_s / max(self._done, 1)
        tokens = f", {format_count(self._num_tokens)} tokens" if self._num_tokens else ""
        speed = f"{format_bytes(int(self._done / elapsed_s))}/s, {format_duration(left_s)} to go"
        self._tell(f"{format_bytes(done)} of {format_bytes(self._all)}{tokens}, {speed}")
