"""Saving and resuming a run: the collective part.

    main thread   step 40 | copy | step 41 | step 42 | step 43 ...
    writer                       | write, read back | rank 0: complete, prune |

With ``train.async_checkpoint`` a save blocks the training only for a copy of the state; a thread writes
the copy. At most one save is under way: the next one, and the end of the run, wait for it. The thread
sends no messages to other ranks, which would mix with those of the training: a shard is on the disk when
its index is in the unfinished folder, where rank 0's thread waits for all of them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from launcher.base.errors import JobError, LauncherError
from launcher.base.files import write_whole
from launcher.base.units import counted, format_bytes, format_duration
from launcher.contract.heartbeat import PEERS, RESTORING
from launcher.contract.job import SAVE_TIMES, lead_s
from launcher.runtime.api import GlobalFragment, RankContext, Stateful
from launcher.runtime.checkpoint import store as checkpoint
from launcher.runtime.checkpoint.shard import save_shard, write_failure
from launcher.runtime.process.log import log


class Saver:
    """One rank's part in the checkpoints of a run, of which one is under way at a time.

    The ranks that save are those of ``group`` (None: all), and the first of them completes.
    """

    def __init__(
        self, ctx: RankContext, update: Stateful, root: Path, group: dist.ProcessGroup | None = None
    ) -> None:
        """``update``: has the state of the run."""
        self._ctx, self._update, self._root, self._group = ctx, update, root, group
        self._is_first = ctx.plan.rank == (dist.get_global_rank(group, 0) if group else 0)
        self._settings = ctx.config.train
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._began = 0.0
        self._step_s = self._save_s = 0.0
        """The longest step and the longest save until now."""
        self._waited_s = 0.0
        """How long the step now under way has waited for a save."""
        self._lead_s = 0

    def check_writable(self) -> None:
        """Checks that checkpoints can be written, where the run saves some.

        Raises:
            JobError: on the first rank, before any training is done.
        """
        if not (self._is_first and self._settings.checkpoint_interval):
            return
        try:
            self._root.mkdir(exist_ok=True)
            with TemporaryFile(dir=self._root):
                pass
        except OSError as error:
            raise JobError(f"no checkpoint can be written in {self._root}: {error.strerror}") from None

    def measure(self, step_s: float) -> None:
        """Takes note of the time of a step, less that of a save in it, and writes how long the ranks need to
        save and end where that has grown: whoever ends a run in time goes by it. A signal may come just after
        a save has begun in the background, which the one for the end then waits for."""
        self._step_s = max(self._step_s, step_s - self._waited_s)
        self._waited_s = 0.0
        num_saves = 2 if self._settings.async_checkpoint else 1
        needed_s = lead_s(step_s=self._step_s, save_s=self._save_s, num_saves=num_saves)
        if not (self._is_first and self._settings.checkpoint_interval and needed_s > 1.05 * self._lead_s):
            return
        self._lead_s = needed_s
        with (self._root.parent / SAVE_TIMES).open("a", encoding="utf-8") as file:
            file.write(f"{needed_s} step {self._step_s:.3f} s, save {self._save_s:.3f} s\n")

    def save(self, step: int) -> None:
        """Saves the state after ``step`` steps, in the background where the run is set so. Collective."""
        self.wait()
        self._began = time.perf_counter()
        if self._is_first:
            self._ctx.clock.may_write()
            try:
                checkpoint.unfinished_folder(self._root, step)
            except OSError as error:
                raise _explained(step, error) from None
        fragments: Sequence[GlobalFragment] = list(self._update.state())
        if self._settings.async_checkpoint:
            fragments = self._copy.take(fragments)
        num_shards = torch.tensor(int(bool(fragments)), device=self._ctx.device)
        with self._ctx.clock.doing(PEERS):
            dist.all_reduce(num_shards, group=self._group)  # also a barrier: the folder exists
        arguments = (step, fragments, int(num_shards))
        if self._settings.async_checkpoint:
            self._thread = threading.Thread(
                target=self._write, args=arguments, name="checkpoint", daemon=True
            )
            self._thread.start()
        else:  # in this thread, whose stack is what a rank that hangs leaves
            self._write(*arguments)
            self.check()
            with self._ctx.clock.doing(PEERS):
                dist.barrier(self._group)
            self._waited_s = time.perf_counter() - self._began

    def check(self) -> None:
        """Raises the error of a save that has failed.

        Raises:
            JobError: when the checkpoint could not be written.
        """
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Waits for the save that is under way, then `check`. On rank 0 the checkpoint is then complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, step: int, fragments: Sequence[GlobalFragment], num_shards: int) -> None:
        folder, may_write = checkpoint.unfinished_name(self._root, step), self._ctx.clock.may_write
        try:
            if fragments:
                begin = time.perf_counter()
                size = format_bytes(save_shard(folder, self._ctx.plan.rank, fragments, may_write))
                took = format_duration(time.perf_counter() - begin)
                log(f"checkpoint after step {step}: shard of {size} written and read back in {took}")
            if self._is_first:
                checkpoint.complete(
                    self._root,
                    step,
                    num_shards,
                    self._ctx.config.run.timeout_s,
                    may_write,
                    sample_order=self._ctx.sample_order,
                )
                kept = self._settings.keep_checkpoints, self._settings.keep_every
                checkpoint.prune(self._root, step, *kept)
                self._save_s = max(self._save_s, time.perf_counter() - self._began)
                log(f"checkpoint after step {step}: complete, {counted(num_shards, 'shard')}")
        except Exception as error:  # of any kind: the training has to see it
            write_failure(folder, self._ctx.plan.rank, error)
            self._error = _explained(step, error)


class HostCopy:
    """A copy of a rank's state in host memory, whose buffers every save reuses."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def take(self, fragments: Iterable[GlobalFragment]) -> list[GlobalFragment]:
        """The fragments with copies of their tensors."""
        copies, is_cuda = [], False
        for index, fragment in enumerate(fragments):
            source = fragment.tensor.detach()
            is_cuda = is_cuda or source.is_cuda
            buffer = self._buffers.get(index)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self._buffers[index] = buffer
            buffer.copy_(source, non_blocking=True)
            copies.append(GlobalFragment(slice=fragment.slice, tensor=buffer))
        if is_cuda:
            torch.cuda.synchronize()
        return copies


def restore(ctx: RankContext, update: Stateful, root: Path, note: Path | None = None) -> int:
    """Loads the newest intact checkpoint; returns its number of steps. Collective over all ranks.

    ``note``: a file that tells the launcher which one it is, and which newer ones are damaged.
    """
    with ctx.clock.doing(RESTORING):
        step = chosen_step(ctx, root, note)
        opened = checkpoint.Checkpoint(checkpoint.folder_of(root, step))
        ctx.sample_order = opened.sample_order
        update.load(opened.read)
    log(f"resumed after step {step}")
    return step


def chosen_step(ctx: RankContext, root: Path, note: Path | None = None) -> int:
    """The step of the newest intact checkpoint, which rank 0 chooses for all; ``note`` as in `restore`."""
    chosen = torch.zeros((), dtype=torch.int64, device=ctx.common_device)
    if ctx.plan.rank == 0:
        step, skipped = checkpoint.newest(root)
        chosen.fill_(step)
        for sentence in skipped:
            log(sentence)
        if note is not None:
            write_whole(note, json.dumps({"step": step, "skipped": skipped}) + "\n")
    with ctx.clock.doing(PEERS):
        dist.broadcast(chosen, src=0)
    return int(chosen)


def _explained(step: int, error: Exception) -> Exception:
    """The error of the run. Only what may be a bug of this program is raised unchanged, with its
    traceback."""
    if not isinstance(error, (OSError, SafetensorError, LauncherError)):
        return error
    return JobError(
        f"the checkpoint after step {step} was not written: {error}. The ones before it are untouched."
    )
