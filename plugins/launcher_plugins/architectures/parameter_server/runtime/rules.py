"""When a server updates, and who gets the parameters: in lock-step, or each worker on its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import isfinite, sqrt
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.contract.heartbeat import PEERS
from launcher.contract.records import UpdateRecord
from launcher.runtime.api import RankContext
from launcher.runtime.train.optimizer import learning_rate, not_finite
from launcher_plugins.architectures.parameter_server.config import settings_of
from launcher_plugins.architectures.parameter_server.runtime.codec import codec_of
from launcher_plugins.architectures.parameter_server.runtime.shard import Shard
from launcher_plugins.architectures.parameter_server.runtime.wire import Notice, Outbox, Wire

Write = Callable[[UpdateRecord], None]


class Desk:
    """What a server knows of its workers, and its way to them. Collective over the servers."""

    def __init__(self, ctx: RankContext, wire: Wire, shard: Shard, first_step: int) -> None:
        self.wire, self.settings, self._config = wire, settings_of(ctx.config), ctx.config
        self.is_first = ctx.plan.rank == wire.num_workers
        self._codec, self._shard, self._clock = codec_of(ctx), shard, ctx.clock
        workers = range(wire.num_workers)
        self.present = set(workers)
        """Workers that have not left and are not gone."""
        self.num_done = dict.fromkeys(workers, first_step)
        """Steps whose gradients are in the parameters, by worker."""
        self.signal = 0
        """The signal on which the run ends; 0: none."""
        self.landing = [
            {bucket: self._codec.empty(piece.numel) for bucket, piece in shard.pieces.items()}
            for _ in workers
        ]
        """Where each worker's gradients arrive, by bucket."""
        places = [(worker, bucket) for worker in workers for bucket in shard.pieces]
        self._posted: dict[tuple[int, int], SimpleQueue[Any]] = {place: SimpleQueue() for place in places}
        """Receives under way, or why there can be none, by worker and bucket."""
        self._outboxes = [Outbox() for _ in workers]
        servers = list(range(wire.num_workers, ctx.plan.plan.world_size))
        self.group: Any = dist.new_group(servers, backend="gloo", use_local_synchronization=True)
        """All servers."""

    def expect(self, worker: int, bucket: int) -> None:
        """Starts receiving the worker's next gradients of a bucket, over those of the last step."""
        posted = self._posted[worker, bucket]
        try:
            posted.put(self.wire.post_payload(worker, bucket, self.landing[worker][bucket]))
        except RuntimeError as error:  # a worker that is gone: its own thread tells of it
            posted.put(error)

    def wait_for_push(self, worker: int, bucket: int) -> None:
        """Returns when the gradients that a worker has announced are there.

        Raises:
            RuntimeError: when the worker is gone.
        """
        posted = self._posted[worker, bucket].get()
        if isinstance(posted, RuntimeError):
            raise posted
        posted.wait()

    def gradient(self, worker: int, bucket: int) -> Tensor:
        """What a worker has pushed, fp32."""
        return self._codec.unpack(self.landing[worker][bucket], self._shard.pieces[bucket].numel)

    def lr(self, step: int) -> float:
        """The learning rate of an update."""
        scale = self.settings.lr_factor(self.wire.num_workers)
        return scale * learning_rate(self._config.optim, step, self._config.train.num_steps)

    def clip_factor(self, norm: float) -> float:
        """What a gradient of this norm is multiplied by."""
        clip_norm = self._config.optim.clip_norm
        return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))

    @property
    def clips(self) -> bool:
        """Whether no update can be made before the norm of all gradients is known."""
        return self._config.optim.clip_norm is not None

    def answer(self, worker: int, values: Iterable[float]) -> None:
        """Sends a few numbers, from the first server alone."""
        if self.is_first:
            self.wire.reply(worker, list(values), self._outboxes[worker])

    def give(self, worker: int, bucket: int, parameters: Tensor) -> None:
        """Starts sending parameters, which may not be written until `wait`."""
        self.wire.give(worker, bucket, parameters, self._outboxes[worker])

    def wait(self, worker: int) -> None:
        """Returns when all that was sent to a worker has arrived; at once when the worker is gone."""
        with suppress(RuntimeError):
            self._outboxes[worker].wait()

    def sum_over_servers(self, value: float) -> float:
        """Adds a number up. Collective over the servers."""
        total = torch.tensor(value, dtype=torch.float64)
        with self._clock.doing(PEERS):
            dist.all_reduce(total, group=self.group)
        return float(total)


class LockStep:
    """One update a step, with the sum of every worker's gradient.

    Without clipping a bucket is updated, and sent, as soon as all workers have pushed it; only the last waits
    for the norm over all servers, which would else be behind it on its way. With clipping all wait for the
    norm, and go out in the order in which a forward needs them.
    """

    def __init__(self, desk: Desk, shard: Shard, write: Write) -> None:
        self._desk, self._shard, self._write = desk, shard, write
        self._arrived: dict[int, set[int]] = {bucket: set() for bucket in shard.pieces}
        self._squares: dict[int, float] = {}
        """Squared norm of each bucket that is summed."""
        self._put_off: list[int] = []
        """Buckets that are summed and wait for the norm."""
        self._ended: set[int] = set()
        """Workers that have pushed all of the step."""
        self._busy_ns = 0
        for worker in desk.present:
            for bucket in shard.pieces:
                desk.expect(worker, bucket)

    def pushed(self, worker: int, bucket: int) -> None:
        """A worker's gradients of a bucket are here."""
        self._arrived[bucket].add(worker)
        self._advance([bucket])

    def done(self, worker: int, notice: Notice) -> None:
        """A worker has pushed all of a step."""
        self._ended.add(worker)
        self._advance([])

    def changed(self) -> None:
        """Those that are left may be complete."""
        self._advance(self._arrived)

    def met(self) -> None:
        """In lock-step all workers have the same parameters already."""

    def _advance(self, buckets: Iterable[int]) -> None:
        present = self._desk.present
        start = time.perf_counter_ns()
        for bucket in buckets:
            workers = self._arrived[bucket]
            if workers and workers >= present and bucket not in self._squares:
                self._take(bucket)
        self._busy_ns += time.perf_counter_ns() - start
        if self._ended and self._ended >= present and len(self._squares) == len(self._arrived):
            self._finish()

    def _take(self, bucket: int) -> None:
        """All workers have pushed a bucket."""
        self._squares[bucket] = self._sum(bucket)
        for worker in self._arrived[bucket]:
            self._desk.expect(worker, bucket)
        if self._desk.clips or len(self._squares) == len(self._arrived):
            self._put_off.append(bucket)
        else:
            self._update(bucket, 1.0)

    def _sum(self, bucket: int) -> float:
        """In the order of the workers, so that a step does not depend on who came first; the squared norm."""
        gradient = self._shard.pieces[bucket].gradient
        first, *others = sorted(self._arrived[bucket])
        gradient.copy_(self._desk.gradient(first, bucket))
        for worker in others:
            gradient.add_(self._desk.gradient(worker, bucket))
        return float(torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square())

    def _update(self, bucket: int, factor: float) -> None:
        piece = self._shard.pieces[bucket]
        piece.update(self._desk.lr(self._step), factor)
        parameters = piece.parameters()
        for worker in sorted(self._desk.present):
            self._desk.give(worker, bucket, parameters)

    @property
    def _step(self) -> int:
        return min(self._desk.num_done[worker] for worker in self._desk.present)

    def _finish(self) -> None:
        desk, step, start = self._desk, self._step, time.perf_counter_ns()
        norm = sqrt(desk.sum_over_servers(sum(self._squares.values())))
        for worker in desk.present:
            desk.answer(worker, (norm, desk.signal))
        if not isfinite(norm):
            for worker in desk.present:
                desk.wait(worker)
            raise not_finite(step, norm)
        for bucket in reversed(self._put_off):
            self._update(bucket, desk.clip_factor(norm))
        for worker in desk.present:
            desk.num_done[worker] = step + 1
        busy_ns = self._busy_ns + time.perf_counter_ns() - start
        self._write(UpdateRecord(update=self._shard.num_updates, step=step, busy_ns=busy_ns))
        self._shard.num_updates += 1
        self._busy_ns = 0
        self._squares.clear()
        self._put_off.clear()
        self._ended.clear()
        for workers in self._arrived.values():
            workers.clear()


class Apart:
    """An update for every worker's gradient; a worker gets the parameters when it is not too far ahead.

    What a worker gets is a copy, so that all of it is of one moment.
    """

    def __init__(self, desk: Desk, shard: Shard, write: Write) -> None:
        self._desk, self._shard, self._write = desk, shard, write
        self._slack = desk.settings.staleness if desk.settings.mode == "bounded" else None
        self._waiting: set[int] = set()
        """Workers that have no parameters for their next step."""
        self._pulled_at = dict.fromkeys(desk.present, shard.num_updates)
        """Updates in the parameters that each worker has."""
        self._copies: dict[tuple[int, int], Tensor] = {}
        for worker in desk.present:
            for bucket in shard.pieces:
                desk.expect(worker, bucket)

    def pushed(self, worker: int, bucket: int) -> None:
        """The gradients of a step are taken together."""

    def done(self, worker: int, notice: Notice) -> None:
        """Updates with the worker's gradient."""
        start, lr = time.perf_counter_ns(), self._desk.lr(notice.step)
        for bucket, piece in self._shard.pieces.items():
            piece.gradient.copy_(self._desk.gradient(worker, bucket))
            self._desk.expect(worker, bucket)
            piece.update(lr, notice.value)
        self._desk.answer(worker, (0.0, self._desk.signal))
        self._desk.num_done[worker] = notice.step + 1
        self._write(
            UpdateRecord(
                update=self._shard.num_updates,
                step=notice.step,
                busy_ns=time.perf_counter_ns() - start,
                worker=worker,
                pulled_at=self._pulled_at[worker],
            )
        )
        self._shard.num_updates += 1
        self._waiting.add(worker)
        self._release()

    def changed(self) -> None:
        """The slowest may be another one now."""
        self._waiting &= self._desk.present
        self._release()

    def met(self) -> None:
        """Every worker gets the same parameters."""
        for worker in sorted(self._desk.present):
            self._give(worker)

    def _release(self) -> None:
        """Sends parameters to those that may go on."""
        num_done = self._desk.num_done
        slowest = min((num_done[worker] for worker in self._desk.present), default=0)
        for worker in sorted(self._waiting):
            if self._slack is None or num_done[worker] - slowest <= self._slack:
                self._waiting.remove(worker)
                self._give(worker)

    def _give(self, worker: int) -> None:
        self._desk.wait(worker)  # the copies of last time have long arrived
        for bucket in reversed(self._shard.pieces):
            parameters = self._shard.pieces[bucket].parameters()
            copy = self._copies.setdefault((worker, bucket), torch.empty_like(parameters))
            self._desk.give(worker, bucket, copy.copy_(parameters))
        self._pulled_at[worker] = self._shard.num_updates
