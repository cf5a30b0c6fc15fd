"""Messages between workers and parameter servers: connections, and a server's channels to its workers.

Transport is gloo's point-to-point. A server receives from each worker in a thread of its own, not from any
source: measured, a receive from any source does not notice that a worker has failed (it waits for the group's
timeout, which then closes the connections to all others, too), while one from that worker fails at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.contract.heartbeat import PEERS
from launcher.contract.optim.rates import learning_rate
from launcher.runtime.api import RankContext
from launcher_plugins.architectures.parameter_server.config import settings_of
from launcher_plugins.architectures.parameter_server.runtime.codec import codec_of
from launcher_plugins.architectures.parameter_server.runtime.shard import ParameterLayout, Shard

PUSH, DONE, SUM, SYNC, LEAVE, LOST = range(6)
"""Kinds of control messages: a step's gradients follow, bucket by bucket (from a server to itself: one of
them has arrived); all are pushed; a number to be summed over the workers; ready for an evaluation; the worker
ends; and, from a server to itself, that a worker has failed."""
Reply = Callable[[], list[float]]
"""Waits for a few numbers under way from the first server."""
_CONTROLS_AHEAD = 16
_CONTROL, _REPLY, _LAYOUT = range(3)
"""Tags of small messages; those of a bucket have tags of their own."""


def _gradients(bucket: int) -> int:
    return 2 * bucket + 8


def _parameters(bucket: int) -> int:
    return 2 * bucket + 9


@dataclass(frozen=True, kw_only=True)
class ControlMessage:
    """A small message of a worker."""

    kind: int
    step: int = 0
    """Step of the gradients, or steps done by a worker that leaves."""
    bucket: int = 0
    """The one that has arrived; not sent."""
    value: float = 0.0
    """Factor of the step's gradients (`DONE`), or the number to sum (`SUM`)."""
    signal: int = 0
    """The signal that has requested the worker to stop; 0: none."""

    def tensor(self) -> Tensor:
        """As it is sent."""
        return torch.tensor([self.kind, self.step, self.value, self.signal], dtype=torch.float64)

    @staticmethod
    def of(tensor: Tensor) -> ControlMessage:
        """The message of `tensor`."""
        kind, step, value, signal = tensor.tolist()
        return ControlMessage(kind=int(kind), step=int(step), value=value, signal=int(signal))


PendingSends = list[tuple[Any, Tensor]]
"""Sends under way, with the tensors that they read."""


def wait_for(sends: PendingSends) -> None:
    """Returns when all are done, and the tensors may be written."""
    pending = sends.copy()
    sends.clear()
    for work, _ in pending:
        work.wait()


class Connections:
    """One rank's connections to the others. Collective over all ranks of the run."""

    def __init__(self, ctx: RankContext) -> None:
        plan = ctx.plan.plan
        self.num_workers, self.num_servers = plan.mesh.num_ranks, settings_of(plan.config).servers
        timeout = timedelta(seconds=plan.config.run.timeout_s)
        self._group: Any = dist.new_group(list(range(plan.world_size)), backend="gloo", timeout=timeout)
        self.sends: PendingSends = []
        """Those of a worker."""
        self._posted: dict[int, deque[tuple[Tensor, Any]]] = {}
        """Posted receives of control messages, by worker."""

    def send(self, tensor: Tensor, rank: int, tag: int, sends: PendingSends) -> None:
        """Starts sending a contiguous CPU tensor; those of one tag are received in order."""
        sends.append((dist.isend(tensor, rank, group=self._group, tag=tag), tensor))

    def post(self, buffer: Tensor, rank: int, tag: int) -> Any:
        """Posts a receive into ``buffer``; returns its handle."""
        return dist.irecv(buffer, rank, group=self._group, tag=tag)

    # A worker's side.

    def send_control(self, server: int, message: ControlMessage) -> None:
        """Sends a control message to a server."""
        self.send(message.tensor(), self.num_workers + server, _CONTROL, self.sends)

    def push(self, server: int, bucket: int, packed: Tensor) -> None:
        """Starts sending gradients to a server."""
        self.send(packed, self.num_workers + server, _gradients(bucket), self.sends)

    def post_pull(self, server: int, bucket: int, buffer: Tensor) -> Any:
        """Posts the receive of a server's part of a bucket of parameters."""
        return self.post(buffer, self.num_workers + server, _parameters(bucket))

    def post_reply(self, num_values: int) -> Reply:
        """Posts the receive of a few numbers from the first server, after those already posted; returns a
        function that waits for them."""
        values = torch.empty(num_values, dtype=torch.float64)
        receive = self.post(values, self.num_workers, _REPLY)

        def numbers() -> list[float]:
            receive.wait()
            found: list[float] = values.tolist()
            return found

        return numbers

    def send_layout(self, layout: ParameterLayout) -> None:
        """Sends the layout to every server."""
        text = torch.frombuffer(bytearray(layout.to_json().encode()), dtype=torch.uint8)
        for server in range(self.num_servers):
            rank = self.num_workers + server
            self.send(torch.tensor([text.numel()], dtype=torch.int64), rank, _LAYOUT, self.sends)
            self.send(text, rank, _LAYOUT, self.sends)

    # A server's side.

    def receive_layout(self) -> ParameterLayout:
        """Receives the layout from the first worker."""
        size = torch.empty(1, dtype=torch.int64)
        self.post(size, 0, _LAYOUT).wait()
        text = torch.empty(int(size), dtype=torch.uint8)
        self.post(text, 0, _LAYOUT).wait()
        return ParameterLayout.from_json(bytes(text.tolist()).decode(), self.num_servers)

    def receive_control(self, worker: int) -> ControlMessage:
        """Receives the next control message of a worker. Several receives are posted ahead: gloo's
        clear-to-send would else wait behind the parameters on their way to that worker."""
        posted = self._posted.setdefault(worker, deque())
        while len(posted) < _CONTROLS_AHEAD:
            tensor = torch.empty(4, dtype=torch.float64)
            posted.append((tensor, self.post(tensor, worker, _CONTROL)))
        tensor, receive = posted.popleft()
        receive.wait()
        return ControlMessage.of(tensor)

    def post_gradients(self, worker: int, bucket: int, buffer: Tensor) -> Any:
        """Posts the receive of a worker's next gradients of a bucket."""
        return self.post(buffer, worker, _gradients(bucket))


class WorkerChannels:
    """A server's channels to its workers, and their progress. Collective over the servers."""

    def __init__(self, ctx: RankContext, connections: Connections, shard: Shard, first_step: int) -> None:
        self.connections, self.settings, self.config = connections, settings_of(ctx.config), ctx.config
        self.is_first = ctx.plan.rank == connections.num_workers
        self._codec, self._shard, self._clock = codec_of(ctx), shard, ctx.clock
        workers = range(connections.num_workers)
        self.present = set(workers)
        """Workers that have neither ended nor failed."""
        self.num_done = dict.fromkeys(workers, first_step)
        """Steps whose gradients are in the parameters, by worker."""
        self.signal = 0
        """The signal on which the run stops; 0: none."""
        self._buffers = [
            {bucket: self._codec.empty(piece.numel) for bucket, piece in shard.pieces.items()}
            for _ in workers
        ]
        """Receive buffers of each worker's gradients, by bucket."""
        keys = [(worker, bucket) for worker in workers for bucket in shard.pieces]
        self._posted: dict[tuple[int, int], SimpleQueue[Any]] = {key: SimpleQueue() for key in keys}
        """Receives under way, or the error of posting one, by worker and bucket."""
        self._sends: list[PendingSends] = [[] for _ in workers]
        servers = list(range(connections.num_workers, ctx.plan.plan.world_size))
        self.group: Any = dist.new_group(servers, backend="gloo", use_local_synchronization=True)
        """All servers."""
        for worker, bucket in keys:
            self.post_receive(worker, bucket)

    def post_receive(self, worker: int, bucket: int) -> None:
        """Posts the receive of the worker's next gradients of a bucket, over those of the last step."""
        posted = self._posted[worker, bucket]
        try:
            posted.put(self.connections.post_gradients(worker, bucket, self._buffers[worker][bucket]))
        except RuntimeError as error:  # the thread of that worker raises it
            posted.put(error)

    def wait_for_push(self, worker: int, bucket: int) -> None:
        """Returns when the gradients that a worker has announced have arrived.

        Raises:
            RuntimeError: when the worker has failed.
        """
        posted = self._posted[worker, bucket].get()
        if isinstance(posted, RuntimeError):
            raise posted
        posted.wait()

    def gradient(self, worker: int, bucket: int) -> Tensor:
        """The gradients that a worker has pushed, fp32."""
        return self._codec.unpack(self._buffers[worker][bucket], self._shard.pieces[bucket].numel)

    def lr(self, step: int) -> float:
        """The learning rate of an update."""
        scale = self.settings.lr_factor(self.connections.num_workers)
        return scale * learning_rate(self.config.optim, step, self.config.train.num_steps)

    def reply(self, worker: int, values: Sequence[float]) -> None:
        """Sends a few numbers, on the first server alone."""
        if self.is_first:
            self._send(worker, torch.tensor(values, dtype=torch.float64), _REPLY)

    def send_parameters(self, worker: int, bucket: int, parameters: Tensor) -> None:
        """Starts sending parameters, which may not be written until `wait`."""
        self._send(worker, parameters, _parameters(bucket))

    def _send(self, worker: int, tensor: Tensor, tag: int) -> None:
        with suppress(RuntimeError):  # the thread that receives from the worker raises it
            self.connections.send(tensor, worker, tag, self._sends[worker])

    def wait(self, worker: int) -> None:
        """Returns when all that was sent to a worker has arrived; at once when the worker has failed."""
        with suppress(RuntimeError):
            wait_for(self._sends[worker])

    def sum_over_servers(self, value: float) -> float:
        """Sums a number. Collective over the servers."""
        total = torch.tensor(value, dtype=torch.float64)
        with self._clock.doing(PEERS):
            dist.all_reduce(total, group=self.group)
        return float(total)
