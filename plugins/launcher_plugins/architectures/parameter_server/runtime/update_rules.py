"""When a server updates and which workers get the parameters: synchronous and asynchronous updates."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import isfinite, sqrt

import torch
from torch import Tensor

from launcher.runtime.train.optimizer import clip_factor, not_finite, squared_norm
from launcher_plugins.architectures.parameter_server.report import UpdateRecord
from launcher_plugins.architectures.parameter_server.runtime.messages import ControlMessage, WorkerChannels
from launcher_plugins.architectures.parameter_server.runtime.shard import Shard

Write = Callable[[UpdateRecord], None]


class UpdateRule(ABC):
    """When a server updates, and which workers get the parameters."""

    def __init__(self, channels: WorkerChannels, shard: Shard, write: Write) -> None:
        self._channels, self._shard, self._write = channels, shard, write

    def pushed(self, worker: int, bucket: int) -> None:
        """A worker's gradients of a bucket have arrived. Nothing yet, where those of a step are applied
        together."""
        return

    @abstractmethod
    def done(self, worker: int, message: ControlMessage) -> None:
        """A worker has pushed all of a step."""

    @abstractmethod
    def worker_left(self) -> None:
        """A worker has ended or failed."""

    def synchronize(self) -> None:
        """Every worker waits for the parameters, before an evaluation. Nothing to do, where all have the
        same."""
        return


class SynchronousUpdate(UpdateRule):
    """One update a step, with the sum of all workers' gradients.

    Without clipping a bucket is updated, and sent, as soon as all workers have pushed it; only the last one
    waits for the norm over all servers, whose message would else be queued behind it. With clipping all wait
    for the norm, and are sent in the order in which a forward needs them.
    """

    def __init__(self, channels: WorkerChannels, shard: Shard, write: Write) -> None:
        super().__init__(channels, shard, write)
        self._clip_norm = channels.config.optim.clip_norm
        self._arrived: dict[int, set[int]] = {bucket: set() for bucket in shard.pieces}
        self._squares: dict[int, float] = {}
        """Squared norm of each bucket whose gradients are summed."""
        self._waiting: list[int] = []
        """Summed buckets that wait for the norm."""
        self._ended: set[int] = set()
        """Workers that have pushed all of the step."""
        self._busy_ns = 0

    def pushed(self, worker: int, bucket: int) -> None:
        """A worker's gradients of a bucket have arrived."""
        self._arrived[bucket].add(worker)
        self._advance([bucket])

    def done(self, worker: int, message: ControlMessage) -> None:
        """A worker has pushed all of a step."""
        self._ended.add(worker)
        self._advance([])

    def worker_left(self) -> None:
        """All remaining workers may have pushed a bucket."""
        self._advance(self._arrived)

    def _advance(self, buckets: Iterable[int]) -> None:
        present = self._channels.present
        start = time.perf_counter_ns()
        for bucket in buckets:
            workers = self._arrived[bucket]
            if workers and workers >= present and bucket not in self._squares:
                self._reduce(bucket)
        self._busy_ns += time.perf_counter_ns() - start
        if self._ended and self._ended >= present and len(self._squares) == len(self._arrived):
            self._finish()

    def _reduce(self, bucket: int) -> None:
        """All workers have pushed a bucket."""
        self._squares[bucket] = self._sum(bucket)
        for worker in self._arrived[bucket]:
            self._channels.post_receive(worker, bucket)
        if self._clip_norm is not None or len(self._squares) == len(self._arrived):
            self._waiting.append(bucket)
        else:
            self._update(bucket, 1.0)

    def _sum(self, bucket: int) -> float:
        """Sums in the order of the workers, so that a step does not depend on the order of arrival; returns
        the squared norm."""
        gradient = self._shard.pieces[bucket].gradient
        first, *others = sorted(self._arrived[bucket])
        gradient.copy_(self._channels.gradient(first, bucket))
        for worker in others:
            gradient.add_(self._channels.gradient(worker, bucket))
        return float(squared_norm([gradient]))

    def _update(self, bucket: int, factor: float) -> None:
        piece = self._shard.pieces[bucket]
        piece.update(self._channels.lr(self._step), factor)
        parameters = piece.parameters()
        for worker in sorted(self._channels.present):
            self._channels.send_parameters(worker, bucket, parameters)

    @property
    def _step(self) -> int:
        return min(self._channels.num_done[worker] for worker in self._channels.present)

    def _finish(self) -> None:
        channels, step, start = self._channels, self._step, time.perf_counter_ns()
        norm = sqrt(channels.sum_over_servers(sum(self._squares.values())))
        for worker in channels.present:
            channels.reply(worker, (norm, channels.signal))
        if not isfinite(norm):
            for worker in channels.present:
                channels.wait(worker)
            raise not_finite(step, norm)
        for bucket in reversed(self._waiting):
            self._update(bucket, clip_factor(norm, self._clip_norm))
        for worker in channels.present:
            channels.num_done[worker] = step + 1
        busy_ns = self._busy_ns + time.perf_counter_ns() - start
        self._write(UpdateRecord(update=self._shard.num_updates, step=step, busy_ns=busy_ns))
        self._shard.num_updates += 1
        self._busy_ns = 0
        self._squares.clear()
        self._waiting.clear()
        self._ended.clear()
        for workers in self._arrived.values():
            workers.clear()


class AsynchronousUpdate(UpdateRule):
    """An update for every worker's gradient; a worker gets the parameters once it is within the staleness
    bound.

    It gets a copy, so that all its parameters are of one update.
    """

    def __init__(self, channels: WorkerChannels, shard: Shard, write: Write) -> None:
        super().__init__(channels, shard, write)
        self._bound = channels.settings.staleness if channels.settings.mode == "bounded" else None
        self._waiting: set[int] = set()
        """Workers that wait for the parameters of their next step."""
        self._pulled_at = dict.fromkeys(channels.present, shard.num_updates)
        """The number of updates in each worker's parameters."""
        self._copies: dict[tuple[int, int], Tensor] = {}

    def done(self, worker: int, message: ControlMessage) -> None:
        """Updates with the worker's gradient."""
        start, lr = time.perf_counter_ns(), self._channels.lr(message.step)
        for bucket, piece in self._shard.pieces.items():
            piece.gradient.copy_(self._channels.gradient(worker, bucket))
            self._channels.post_receive(worker, bucket)
            piece.update(lr, message.value)
        self._channels.reply(worker, (0.0, self._channels.signal))
        self._channels.num_done[worker] = message.step + 1
        self._write(
            UpdateRecord(
                update=self._shard.num_updates,
                step=message.step,
                busy_ns=time.perf_counter_ns() - start,
                worker=worker,
                pulled_at=self._pulled_at[worker],
            )
        )
        self._shard.num_updates += 1
        self._waiting.add(worker)
        self._release()

    def worker_left(self) -> None:
        """The slowest worker may have changed."""
        self._waiting &= self._channels.present
        self._release()

    def synchronize(self) -> None:
        """Every worker gets the same parameters."""
        for worker in sorted(self._channels.present):
            self._send(worker)

    def _release(self) -> None:
        """Sends parameters to the workers within the bound."""
        num_done = self._channels.num_done
        slowest = min((num_done[worker] for worker in self._channels.present), default=0)
        for worker in sorted(self._waiting):
            if self._bound is None or num_done[worker] - slowest <= self._bound:
                self._waiting.remove(worker)
                self._send(worker)

    def _send(self, worker: int) -> None:
        self._channels.wait(worker)  # does not block: the copies of the last step have arrived
        for bucket in reversed(self._shard.pieces):
            parameters = self._shard.pieces[bucket].parameters()
            copy = self._copies.setdefault((worker, bucket), torch.empty_like(parameters))
            self._channels.send_parameters(worker, bucket, copy.copy_(parameters))
        self._pulled_at[worker] = self._shard.num_updates
