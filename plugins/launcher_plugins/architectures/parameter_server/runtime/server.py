"""A server: holds its key range, and updates it with the gradients that the workers push.

One thread for each worker receives into buffers of that worker; the main thread does everything else, in the
order in which the control messages arrive. The failure of a worker is one more message. Receives are posted
as soon as their buffer is free: gloo sends nothing before, and its clear-to-send is slow over a busy link.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from launcher.base.errors import PeerError
from launcher.contract.heartbeat import SERVING, UPDATING
from launcher.contract.model.checkpoint import first_step
from launcher.contract.records import WINDOW_STEPS
from launcher.runtime.api import FragmentReader, RankContext
from launcher.runtime.checkpoint import store as checkpoint
from launcher.runtime.checkpoint.initial import initial_state
from launcher.runtime.checkpoint.saving import Saver, chosen_step
from launcher.runtime.measure.clock import rank_header
from launcher.runtime.measure.records import RecordWriter
from launcher.runtime.process.log import log
from launcher.runtime.process.stop import StopRequest
from launcher_plugins.architectures.parameter_server.report import LossRecord, UpdateRecord, summed
from launcher_plugins.architectures.parameter_server.runtime.messages import (
    DONE,
    LEAVE,
    LOST,
    PUSH,
    SUM,
    SYNC,
    Connections,
    ControlMessage,
    WorkerChannels,
)
from launcher_plugins.architectures.parameter_server.runtime.shard import Shard
from launcher_plugins.architectures.parameter_server.runtime.update_rules import (
    AsynchronousUpdate,
    SynchronousUpdate,
    UpdateRule,
)

_BEAT_INTERVAL_S = 0.2
"""Below the shortest run.timeout_s."""


def serve(ctx: RankContext, run_dir: Path, *, resume: bool) -> None:
    """Serves until every worker has ended. Collective over all ranks."""
    connections = Connections(ctx)
    root = run_dir / "checkpoints"
    first = chosen_step(ctx, root) if resume else first_step(ctx.config.train)
    with ctx.clock.doing(SERVING):
        layout = connections.receive_layout()
        shard = Shard(ctx, layout, ctx.plan.rank - connections.num_workers)
        for bucket, piece in shard.pieces.items():  # the first worker's weights; a checkpoint replaces them
            weights = torch.empty_like(piece.parameters())
            connections.post_gradients(0, bucket, weights).wait()
            piece.master.copy_(weights)
        for index, fragment in enumerate(shard.frozen, len(layout.buckets)):
            connections.post_gradients(0, index, fragment.tensor).wait()
    state: FragmentReader | None = None
    if resume:
        opened = checkpoint.Checkpoint(checkpoint.folder_of(root, first))
        state, ctx.sample_order = opened.read, opened.sample_order
    elif first:  # else the first worker's weights are all
        state = initial_state(ctx)
    if state is not None:
        shard.load(state)
    channels = WorkerChannels(ctx, connections, shard, first)
    Server(ctx, channels, shard, run_dir).run()


class Server:
    """The main thread of a server."""

    def __init__(self, ctx: RankContext, channels: WorkerChannels, shard: Shard, run_dir: Path) -> None:
        self._clock, self._shard = ctx.clock, shard
        self._channels, self._run_dir = channels, run_dir
        self._train = ctx.config.train
        self._writer = RecordWriter(run_dir, rank_header(ctx.plan, ctx.device))
        rule = SynchronousUpdate if channels.settings.is_lockstep else AsynchronousUpdate
        self._rule: UpdateRule = rule(channels, shard, self._record)
        self._updates: list[UpdateRecord] = []
        """Since their sums were written last."""
        self._messages: SimpleQueue[tuple[int, ControlMessage]] = SimpleQueue()
        self._sums: dict[int, deque[float]] = defaultdict(deque)
        """Numbers to sum over the workers, by worker, in the order in which they came."""
        self._synchronizing: set[int] = set()
        self._ended: dict[int, int] = {}
        """Steps done by the workers that have ended."""
        self._stop = StopRequest(torch.device("cpu"))
        self._saver = Saver(ctx, shard, run_dir / "checkpoints", channels.group)
        self._saver.check_writable()
        self._saved_step = min(channels.num_done.values())

    def run(self) -> None:
        """Serves until every worker has ended or failed."""
        if self._train.checkpoint_interval:
            self._stop.arm()
        for worker in sorted(self._channels.present):
            threading.Thread(
                target=self._listen, args=(worker,), name=f"worker-{worker}", daemon=True
            ).start()
        clock = self._clock
        clock.begin_step(self._saved_step)
        clock.end_startup()
        while self._channels.present:
            with clock.doing(SERVING):
                worker, message = self._next()
            with clock.doing(UPDATING):
                self._channels.signal = self._channels.signal or message.signal or self._stop.received
                self._handle(worker, message)
                self._save_if_due()
            clock.begin_step(min(self._channels.num_done.values()))
        self._end()

    def _record(self, update: UpdateRecord) -> None:
        self._writer.write(update, until_window=True)
        self._updates.append(update)
        if len(self._updates) == WINDOW_STEPS:
            self._writer.end_window([summed(self._updates).values()], update.update)
            self._updates = []

    def _next(self) -> tuple[int, ControlMessage]:
        """Waits for a message, however long: a server that waits has not hung."""
        while True:
            with suppress(Empty):
                return self._messages.get(timeout=_BEAT_INTERVAL_S)
            self._clock.beat()

    def _listen(self, worker: int) -> None:
        """Receives all messages of a worker, until it ends or fails."""
        message = ControlMessage(kind=SUM)
        while message.kind not in (LEAVE, LOST):
            try:
                message = self._channels.connections.receive_control(worker)
                if message.kind == PUSH:  # a step's gradients, in the order in which the worker pushes them
                    for bucket in self._shard.pieces:
                        self._channels.wait_for_push(worker, bucket)
                        self._messages.put((worker, ControlMessage(kind=PUSH, bucket=bucket)))
                    continue
            except RuntimeError as error:
                log(f"worker {worker}: {error}")
                message = ControlMessage(kind=LOST)
            self._messages.put((worker, message))

    def _handle(self, worker: int, message: ControlMessage) -> None:
        if message.kind == PUSH:
            self._rule.pushed(worker, message.bucket)
        elif message.kind == DONE:
            self._rule.done(worker, message)
        elif message.kind == SUM:
            self._sums[worker].append(message.value)
        elif message.kind == SYNC:
            self._synchronizing.add(worker)
        else:
            self._remove(worker, message)
        self._reply_all()

    def _remove(self, worker: int, message: ControlMessage) -> None:
        """Continues without a worker that has ended or failed.

        Raises:
            PeerError: when it has failed and the run must not continue, or no worker is left.
        """
        self._channels.present.remove(worker)
        self._sums.pop(worker, None)
        self._synchronizing.discard(worker)
        if message.kind == LEAVE:
            self._ended[worker] = message.step
        else:
            num_done, may_continue = self._channels.num_done[worker], self._channels.settings.goes_on
            if not may_continue or not (self._channels.present or self._ended):
                fix = (
                    "" if may_continue else "; with architecture.on_worker_loss=continue the others continue"
                )
                raise PeerError(f"worker {worker} (rank {worker}) has failed after {num_done} steps{fix}")
            self._writer.write(LossRecord(worker=worker, step=num_done))
            log(f"worker {worker} has failed after {num_done} steps; the others continue")
        self._reply_all()  # in the order in which the others wait: first a sum, then a step's norm
        self._rule.worker_left()

    def _reply_all(self) -> None:
        """Sends sums, and parameters for an evaluation, for which every worker waits."""
        present = self._channels.present
        while present and all(self._sums[worker] for worker in present):
            total = sum(self._sums[worker].popleft() for worker in sorted(present))
            for worker in present:
                self._channels.reply(worker, [total])
        if self._synchronizing and self._synchronizing >= present:
            self._synchronizing.clear()
            self._rule.synchronize()

    def _save_if_due(self) -> None:
        """Saves when every worker has done a multiple of the interval's steps."""
        interval, present = self._train.checkpoint_interval, self._channels.present
        num_done = min((self._channels.num_done[worker] for worker in present), default=0)
        if interval and num_done % interval == 0 and num_done > self._saved_step:
            self._save(num_done)
        self._saver.check()

    def _save(self, step: int) -> None:
        self._saver.save(step)
        self._saved_step = step

    def _end(self) -> None:
        num_done = min(self._ended.values())
        if self._train.checkpoint_interval and num_done > self._saved_step:
            self._save(num_done)
        self._saver.wait()
        if self._channels.signal and num_done < self._train.num_steps and self._channels.is_first:
            self._stop.agreed = self._channels.signal
            self._stop.write_note(self._run_dir, num_done)
        self._writer.close()
