"""A server: holds its key range, and updates it with what the workers push.

One thread for each worker receives into memory of that worker; the main thread does everything else, in the
order in which the notices came in. A worker that is gone is one more notice. Receives are posted as soon as
their memory is free: gloo sends nothing before, and over a busy link the word that it may takes its time.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from launcher.base.errors import JobError
from launcher.contract.heartbeat import SERVING, UPDATING
from launcher.contract.records import Header, LossRecord
from launcher.runtime.api import RankContext
from launcher.runtime.checkpoint import store as checkpoint
from launcher.runtime.checkpoint.saving import Saver, chosen_step
from launcher.runtime.measure.clock import RecordWriter, device_name, host_facts
from launcher.runtime.process.log import say
from launcher.runtime.process.stop import StopRequest
from launcher_plugins.architectures.parameter_server.config import settings_of
from launcher_plugins.architectures.parameter_server.runtime.rules import Apart, Desk, LockStep
from launcher_plugins.architectures.parameter_server.runtime.shard import Shard
from launcher_plugins.architectures.parameter_server.runtime.wire import (
    DONE,
    LEAVE,
    LOST,
    MEET,
    PUSH,
    SUM,
    Notice,
    Wire,
)

_BEAT_INTERVAL_S = 0.2
"""Below the shortest run.timeout_s."""


def serve(ctx: RankContext, run_dir: Path, *, resume: bool) -> None:
    """Serves until every worker has left. Collective over all ranks."""
    wire = Wire(ctx)
    root = run_dir / "checkpoints"
    first_step = chosen_step(ctx, root) if resume else 0
    with ctx.clock.doing(SERVING):
        layout = wire.receive_layout()
        shard = Shard(ctx, layout, ctx.plan.rank - wire.num_workers)
        for bucket, piece in shard.pieces.items():  # the first worker's weights; what was saved replaces them
            weights = torch.empty_like(piece.parameters())
            wire.post_payload(0, bucket, weights).wait()
            piece.master.copy_(weights)
    if resume:
        shard.load(checkpoint.Checkpoint(checkpoint.folder_of(root, first_step)).read)
    desk = Desk(ctx, wire, shard, first_step)
    Server(ctx, desk, shard, run_dir).run()


class Rule(Protocol):
    """When to update, and who gets the parameters."""

    def pushed(self, worker: int, bucket: int) -> None:
        """A worker's gradients of a bucket are here."""
        ...

    def done(self, worker: int, notice: Notice) -> None:
        """A worker has pushed all of a step."""
        ...

    def changed(self) -> None:
        """A worker has left or is gone."""
        ...

    def met(self) -> None:
        """Every worker waits for the parameters, before an evaluation."""
        ...


class Server:
    """The main thread of a server; to a `Saver`, what has the state."""

    def __init__(self, ctx: RankContext, desk: Desk, shard: Shard, run_dir: Path) -> None:
        self.ctx, self.update = ctx, shard
        self._desk, self._run_dir = desk, run_dir
        self._train = ctx.config.train
        self._writer = RecordWriter(run_dir / "metrics", _header(ctx))
        lockstep = settings_of(ctx.config).is_lockstep
        rule = LockStep if lockstep else Apart
        self._rule: Rule = rule(desk, shard, self._writer.write)
        self._notices: SimpleQueue[tuple[int, Notice]] = SimpleQueue()
        self._sums: dict[int, deque[float]] = defaultdict(deque)
        """By worker, what is to be added up, in the order in which it has asked."""
        self._meeting: set[int] = set()
        self._left: dict[int, int] = {}
        """Steps done by the workers that have left."""
        self._stop = StopRequest(torch.device("cpu"))
        self._saver = Saver(self, run_dir / "checkpoints", desk.group)
        self._saver.check_place()
        self._saved_step = min(desk.num_done.values())

    def run(self) -> None:
        """Serves until every worker has left."""
        if self._train.checkpoint_interval:
            self._stop.arm()
        for worker in sorted(self._desk.present):
            threading.Thread(
                target=self._listen, args=(worker,), name=f"worker-{worker}", daemon=True
            ).start()
        clock = self.ctx.clock
        clock.begin_step(self._saved_step)
        clock.watch()
        while self._desk.present:
            with clock.doing(SERVING):
                worker, notice = self._next()
            with clock.doing(UPDATING):
                self._desk.signal = self._desk.signal or notice.signal or self._stop.received
                self._handle(worker, notice)
                self._save_if_due()
            clock.begin_step(min(self._desk.num_done.values()))
        self._end()

    def _next(self) -> tuple[int, Notice]:
        """Waits for a notice, however long; a server that hangs is one that does not wait."""
        while True:
            with suppress(Empty):
                return self._notices.get(timeout=_BEAT_INTERVAL_S)
            self.ctx.clock.beat()

    def _listen(self, worker: int) -> None:
        """Receives what a worker sends, until it leaves or is gone."""
        notice = Notice(kind=SUM)
        while notice.kind not in (LEAVE, LOST):
            try:
                notice = self._desk.wire.receive_notice(worker)
                if notice.kind == PUSH:
                    self._receive_step(worker)
                    continue
            except RuntimeError as error:
                say(f"worker {worker}: {error}")
                notice = Notice(kind=LOST)
            self._notices.put((worker, notice))

    def _receive_step(self, worker: int) -> None:
        """Receives a worker's gradients, in the order in which it pushes them."""
        for bucket in self.update.pieces:
            self._desk.wait_for_push(worker, bucket)
            self._notices.put((worker, Notice(kind=PUSH, bucket=bucket)))

    def _handle(self, worker: int, notice: Notice) -> None:
        if notice.kind == PUSH:
            self._rule.pushed(worker, notice.bucket)
        elif notice.kind == DONE:
            self._rule.done(worker, notice)
        elif notice.kind == SUM:
            self._sums[worker].append(notice.value)
        elif notice.kind == MEET:
            self._meeting.add(worker)
        else:
            self._take_off(worker, notice)
        self._answer_all()

    def _take_off(self, worker: int, notice: Notice) -> None:
        """Goes on without a worker."""
        self._desk.present.remove(worker)
        self._sums.pop(worker, None)
        self._meeting.discard(worker)
        if notice.kind == LEAVE:
            self._left[worker] = notice.step
        else:
            num_done = self._desk.num_done[worker]
            self._refuse_loss(worker, num_done)
            self._writer.write(LossRecord(worker=worker, step=num_done))
            say(f"worker {worker} is gone after {num_done} steps; the others go on")
        self._answer_all()  # in the order in which the others have asked: first a sum, then a step's norm
        self._rule.changed()

    def _refuse_loss(self, worker: int, num_done: int) -> None:
        goes_on = self._desk.settings.goes_on
        if goes_on and (self._desk.present or self._left):
            return
        way = "" if goes_on else "; with architecture.on_worker_loss=continue the others go on"
        raise JobError(f"worker {worker} (rank {worker}) is gone after {num_done} steps{way}")

    def _answer_all(self) -> None:
        """Answers where every worker has asked."""
        present = self._desk.present
        while present and all(self._sums[worker] for worker in present):
            total = sum(self._sums[worker].popleft() for worker in sorted(present))
            for worker in present:
                self._desk.answer(worker, [total])
        if self._meeting and self._meeting >= present:
            self._meeting.clear()
            self._rule.met()

    def _save_if_due(self) -> None:
        """Saves what every worker has contributed so many steps to."""
        interval, present = self._train.checkpoint_interval, self._desk.present
        num_done = min((self._desk.num_done[worker] for worker in present), default=0)
        if interval and num_done % interval == 0 and num_done > self._saved_step:
            self._save(num_done)
        self._saver.check()

    def _save(self, step: int) -> None:
        self._saver.save(step)
        self._saved_step = step

    def _end(self) -> None:
        num_done = min(self._left.values())
        if self._train.checkpoint_interval and num_done > self._saved_step:
            self._save(num_done)
        self._saver.wait()
        if self._desk.signal and num_done < self._train.num_steps and self._desk.is_first:
            self._stop.agreed = self._desk.signal
            self._stop.leave_note(self._run_dir, num_done)
        self._writer.close()


def _header(ctx: RankContext) -> Header:
    return Header(
        rank=ctx.plan.rank,
        role=ctx.plan.role.name,
        pp_rank=0,
        dp_rank=0,
        tp_rank=0,
        device=device_name(torch.device("cpu")),
        p2p_latency_ns=0,
        **host_facts(),
    )
