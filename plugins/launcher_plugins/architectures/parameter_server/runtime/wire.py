"""Messages between workers and parameter servers, and how the parameters are laid out in them.

Transport is gloo's point-to-point. A server receives from each worker in a thread of its own, not from any
source: measured, a receive from any source never notices that a worker is gone (it waits out the group's
timeout, which then closes the connections to all the others, too), while one from that worker fails at once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.runtime.api import RankContext
from launcher_plugins.architectures.parameter_server.config import settings_of

PUSH, DONE, SUM, MEET, LEAVE, LOST = range(6)
"""What a message says: a step's gradients follow, bucket by bucket (by a server to itself: one of them is
here); they are all pushed; a number to be added up over the workers; ready for an evaluation; going; and, by
a server to itself, that a worker is gone."""
_NOTICES_AHEAD = 16
_NOTICE, _ANSWER, _LAYOUT = range(3)
"""Tags of small messages; those of a bucket have tags of their own."""


def _gradients(bucket: int) -> int:
    return 2 * bucket + 8


def _parameters(bucket: int) -> int:
    return 2 * bucket + 9


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A small message of a worker."""

    kind: int
    step: int = 0
    """Step of the gradients, or steps done by a worker that leaves."""
    bucket: int = 0
    """The one that is here; not sent."""
    value: float = 0.0
    """Factor of the step's gradients (`DONE`), or what is added up (`SUM`)."""
    signal: int = 0
    """The signal that has told the worker to end; 0: none."""

    def tensor(self) -> Tensor:
        """As it is sent."""
        return torch.tensor([self.kind, self.step, self.value, self.signal], dtype=torch.float64)

    @staticmethod
    def of(tensor: Tensor) -> Notice:
        """As it was before."""
        kind, step, value, signal = tensor.tolist()
        return Notice(kind=int(kind), step=int(step), value=value, signal=int(signal))


@dataclass(frozen=True, kw_only=True)
class Held:
    """A parameter in its place among the others."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The flattened parameters: buckets, each cut into one key range for every server.

    >>> weight = Held(name="w", shape=(5, 2))
    >>> [Layout(buckets=((weight,),), num_servers=3).span(0, server) for server in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """

    buckets: tuple[tuple[Held, ...], ...]
    """In the order in which a backward fills them."""
    num_servers: int

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each bucket."""
        return tuple(sum(held.numel for held in bucket) for bucket in self.buckets)

    def span(self, bucket: int, server: int) -> tuple[int, int]:
        """First and last element, not included, of a bucket that a server holds."""
        numel = self.numels[bucket]
        return server * numel // self.num_servers, (server + 1) * numel // self.num_servers

    def pieces(self, server: int) -> tuple[int, ...]:
        """The buckets of which a server holds something."""
        spans = [self.span(bucket, server) for bucket in range(len(self.buckets))]
        return tuple(bucket for bucket, (start, stop) in enumerate(spans) if start < stop)

    def owners(self, bucket: int) -> tuple[int, ...]:
        """The servers that hold some of a bucket."""
        spans = [self.span(bucket, server) for server in range(self.num_servers)]
        return tuple(server for server, (start, stop) in enumerate(spans) if start < stop)

    def to_json(self) -> str:
        """As a worker tells it to the servers, which build no model."""
        return json.dumps([[[held.name, held.shape] for held in bucket] for bucket in self.buckets])

    @staticmethod
    def from_json(text: str, num_servers: int) -> Layout:
        """The layout told as ``text``."""
        buckets = tuple(
            tuple(Held(name=name, shape=tuple(shape)) for name, shape in bucket)
            for bucket in json.loads(text)
        )
        return Layout(buckets=buckets, num_servers=num_servers)


class Outbox:
    """Sends under way; keeps what they read alive."""

    def __init__(self) -> None:
        self._sends: list[tuple[Any, Tensor]] = []

    def add(self, work: Any, tensor: Tensor) -> None:
        """Takes note of a send."""
        self._sends.append((work, tensor))

    def wait(self) -> None:
        """Returns when every tensor has been received, and may be written again."""
        sends, self._sends = self._sends, []
        for work, _ in sends:
            work.wait()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A few numbers on their way from the first server."""

    values: Tensor
    receive: Any

    def wait(self) -> list[float]:
        """The numbers, once they are here."""
        self.receive.wait()
        found: list[float] = self.values.tolist()
        return found


class Wire:
    """One rank's connections. Collective over all ranks of the run."""

    def __init__(self, ctx: RankContext) -> None:
        plan = ctx.plan.plan
        self.num_workers, self.num_servers = plan.mesh.num_ranks, settings_of(plan.config).servers
        self._group: Any = dist.new_group(
            list(range(plan.world_size)),
            backend="gloo",
            timeout=timedelta(seconds=plan.config.run.timeout_s),
        )

        self._expected: dict[int, deque[tuple[Tensor, Any]]] = {}

    def send(self, tensor: Tensor, rank: int, tag: int, outbox: Outbox) -> None:
        """Starts sending a contiguous tensor of the host; it is received in the order of its tag."""
        outbox.add(dist.isend(tensor, rank, group=self._group, tag=tag), tensor)

    def post(self, buffer: Tensor, rank: int, tag: int) -> Any:
        """Starts receiving into ``buffer``; returns what can be waited for."""
        return dist.irecv(buffer, rank, group=self._group, tag=tag)

    # A worker's side.

    def notify(self, server: int, notice: Notice, outbox: Outbox) -> None:
        """Sends a notice to a server."""
        self.send(notice.tensor(), self.num_workers + server, _NOTICE, outbox)

    def push(self, server: int, bucket: int, payload: Tensor, outbox: Outbox) -> None:
        """Sends gradients."""
        self.send(payload, self.num_workers + server, _gradients(bucket), outbox)

    def post_pull(self, server: int, bucket: int, buffer: Tensor) -> Any:
        """Starts receiving a server's part of a bucket of parameters."""
        return self.post(buffer, self.num_workers + server, _parameters(bucket))

    def post_answer(self, num_values: int) -> Answer:
        """Expects a few numbers from the first server, behind those already expected."""
        values = torch.empty(num_values, dtype=torch.float64)
        return Answer(values=values, receive=self.post(values, self.num_workers, _ANSWER))

    def tell_layout(self, layout: Layout, outbox: Outbox) -> None:
        """Tells every server what it holds."""
        text = torch.frombuffer(bytearray(layout.to_json().encode()), dtype=torch.uint8)
        for server in range(self.num_servers):
            rank = self.num_workers + server
            self.send(torch.tensor([text.numel()], dtype=torch.int64), rank, _LAYOUT, outbox)
            self.send(text, rank, _LAYOUT, outbox)

    # A server's side.

    def receive_layout(self) -> Layout:
        """Waits for the first worker to tell what there is to hold."""
        size = torch.empty(1, dtype=torch.int64)
        self.post(size, 0, _LAYOUT).wait()
        text = torch.empty(int(size), dtype=torch.uint8)
        self.post(text, 0, _LAYOUT).wait()
        return Layout.from_json(bytes(text.tolist()).decode(), self.num_servers)

    def receive_notice(self, worker: int) -> Notice:
        """Waits for the next notice of a worker. Many are expected at once: the word that one may be sent
        would else wait behind the parameters on their way to that worker."""
        expected = self._expected.setdefault(worker, deque())
        while len(expected) < _NOTICES_AHEAD:
            tensor = torch.empty(4, dtype=torch.float64)
            expected.append((tensor, self.post(tensor, worker, _NOTICE)))
        tensor, receive = expected.popleft()
        receive.wait()
        return Notice.of(tensor)

    def post_payload(self, worker: int, bucket: int, buffer: Tensor) -> Any:
        """Starts receiving a worker's next gradients of a bucket."""
        return self.post(buffer, worker, _gradients(bucket))

    def reply(self, worker: int, values: Sequence[float], outbox: Outbox) -> None:
        """Sends a few numbers to a worker. One that is gone gets nothing: its own thread tells of it."""
        with suppress(RuntimeError):
            self.send(torch.tensor(values, dtype=torch.float64), worker, _ANSWER, outbox)

    def give(self, worker: int, bucket: int, parameters: Tensor, outbox: Outbox) -> None:
        """Sends parameters to a worker, likewise."""
        with suppress(RuntimeError):
            self.send(parameters, worker, _parameters(bucket), outbox)
