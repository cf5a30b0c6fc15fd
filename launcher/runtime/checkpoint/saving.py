"""Saving and resuming a run: what its ranks do together.

    main thread   step 40 | copy | step 41 | step 42 | step 43 ...
    writer                       | write, read back | rank 0: complete, prune |

With ``train.async_checkpoint`` a save holds the training up only for a copy of the state; a thread writes
the copy. At most one save is under way: the next one, and the end of the run, wait for it. The thread
sends nothing to other ranks, whose messages it would mix with those of the training: that a shard is on
the disk is told by its index in the unfinished folder, where rank 0's thread waits for all of them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from launcher.base.errors import JobError, LauncherError
from launcher.base.files import write_whole
from launcher.base.units import counted, format_bytes, format_duration
from launcher.contract.heartbeat import PEERS, RESTORING
from launcher.runtime.api import GlobalFragment, RankContext, Stateful
from launcher.runtime.checkpoint import store as checkpoint
from launcher.runtime.checkpoint.shard import leave_failure, save_shard
from launcher.runtime.process.log import say


class HasState(Protocol):
    """What can be saved: a `Trainer`, or what holds the state in its place."""

    @property
    def ctx(self) -> RankContext:
        """Which rank of which plan it is."""
        ...

    @property
    def update(self) -> Stateful:
        """Whose state is the run's."""
        ...


class Saver:
    """One rank's part in the checkpoints of a run, one at a time.

    The ranks that save are those of ``group`` (None: all), and the first of them completes.
    """

    def __init__(self, holder: HasState, root: Path, group: dist.ProcessGroup | None = None) -> None:
        self._ctx, self._update, self._root, self._group = holder.ctx, holder.update, root, group
        self._is_first = holder.ctx.plan.rank == (dist.get_global_rank(group, 0) if group else 0)
        self._settings = holder.ctx.config.train
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def check_place(self) -> None:
        """Returns when checkpoints can be written, or none is wanted.

        Raises:
            JobError: on the first rank, before the training that would be lost.
        """
        if not (self._is_first and self._settings.checkpoint_interval):
            return
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self._root):
                pass
        except OSError as error:
            raise JobError(f"no checkpoint can be written in {self._root}: {error.strerror}") from None

    def save(self, step: int) -> None:
        """Saves the state after ``step`` steps; in the background, where the run is set to. Collective."""
        self.wait()
        if self._is_first:
            try:
                checkpoint.unfinished_folder(self._root, step)
            except OSError as error:
                raise _explained(step, error) from None
        fragments: Sequence[GlobalFragment] = list(self._update.state())
        if self._settings.async_checkpoint:
            fragments = self._copy.take(fragments)
        num_shards = torch.tensor(int(bool(fragments)), device=self._ctx.device)
        with self._ctx.clock.doing(PEERS):
            dist.all_reduce(num_shards, group=self._group)  # also tells the others that the folder is there
        if not self._settings.async_checkpoint:
            self._write(step, fragments, int(num_shards))
            self.wait()
            with self._ctx.clock.doing(PEERS):
                dist.barrier(self._group)
            return
        arguments = (step, fragments, int(num_shards))
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what a save that has ended has failed with, if it has.

        Raises:
            JobError: when the checkpoint could not be written.
        """
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Returns when no save is under way; as `check`. On rank 0 the checkpoint is then complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, step: int, fragments: Sequence[GlobalFragment], num_shards: int) -> None:
        folder = checkpoint.unfinished_name(self._root, step)
        try:
            if fragments:
                self._write_shard(step, folder, fragments)
            if self._is_first:
                self._complete(step, num_shards)
        except Exception as error:  # whatever it is, the training has to see it
            leave_failure(folder, self._ctx.plan.rank, error)
            self._error = _explained(step, error)

    def _write_shard(self, step: int, folder: Path, fragments: Sequence[GlobalFragment]) -> None:
        begin = time.perf_counter()
        size = save_shard(folder, self._ctx.plan.rank, fragments)
        took = format_duration(time.perf_counter() - begin)
        say(f"checkpoint after step {step}: shard of {format_bytes(size)} written and read back in {took}")

    def _complete(self, step: int, num_shards: int) -> None:
        checkpoint.complete(self._root, step, num_shards, self._ctx.config.run.timeout_s)
        checkpoint.prune(self._root, step, self._settings.keep_checkpoints)
        say(f"checkpoint after step {step}: complete, {counted(num_shards, 'shard')}")


class HostCopy:
    """A copy of a rank's state in the memory of the host, which every save uses again."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def take(self, fragments: Iterable[GlobalFragment]) -> list[GlobalFragment]:
        """The fragments as they are now, whatever becomes of their tensors."""
        copies, is_cuda = [], False
        for place, fragment in enumerate(fragments):
            source = fragment.tensor.detach()
            is_cuda = is_cuda or source.is_cuda
            buffer = self._buffer(place, source)
            buffer.copy_(source, non_blocking=True)
            copies.append(GlobalFragment(slice=fragment.slice, tensor=buffer))
        if is_cuda:
            torch.cuda.synchronize()
        return copies

    def _buffer(self, place: int, like: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(place)
        if known is None or (known.shape, known.dtype) != (like.shape, like.dtype):
            known = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[place] = known
        return known


def save(trainer: HasState, root: Path, step: int) -> None:
    """Writes a checkpoint after ``step`` steps and waits for it. Collective over all ranks."""
    saver = Saver(trainer, root)
    saver.save(step)
    saver.wait()
    dist.barrier()


def restore(holder: HasState, root: Path, note: Path | None = None) -> int:
    """Loads the newest good checkpoint; returns the number of steps it has behind it. Collective over all
    ranks.

    ``note``: where the launcher is told which one it is, and which newer ones are damaged.
    """
    with holder.ctx.clock.doing(RESTORING):
        step = chosen_step(holder.ctx, root, note)
        holder.update.load(checkpoint.Checkpoint(checkpoint.folder_of(root, step)).read)
    say(f"resumed after step {step}")
    return step


def chosen_step(ctx: RankContext, root: Path, note: Path | None = None) -> int:
    """The step of the newest good checkpoint, which rank 0 chooses for all; as `restore`."""
    chosen = torch.zeros((), dtype=torch.int64, device=ctx.common_device)
    if ctx.plan.rank == 0:
        step, skipped = checkpoint.newest(root)
        chosen.fill_(step)
        for sentence in skipped:
            say(sentence)
        if note is not None:
            note.parent.mkdir(exist_ok=True)
            write_whole(note, json.dumps({"step": step, "skipped": skipped}) + "\n")
    with ctx.clock.doing(PEERS):
        dist.broadcast(chosen, src=0)
    return int(chosen)


def _explained(step: int, error: Exception) -> Exception:
    """What the run fails with; a traceback is of use only where the fault may be this program's."""
    if not isinstance(error, (OSError, SafetensorError, LauncherError)):
        return error
    return JobError(
        f"the checkpoint after step {step} was not written: {error}. The ones before it are untouched."
    )
