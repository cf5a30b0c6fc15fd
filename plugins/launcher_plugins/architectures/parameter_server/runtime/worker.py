"""A worker: pushes its gradients to the servers bucket by bucket, and pulls the updated parameters.

    last backward   | .. B | .. B | .. B |     each bucket is pushed once it is filled
    apply           | all pushed | norm is received
    next forward    | F .. | F .. | F .. |     each layer waits for its own parameters alone

Servers may reply while the backward still runs: a bucket's parameters are received into the model itself,
which by then has used the old ones (autograd accumulates a parameter's gradient after every use of its value,
and raises an error where a layer has hidden one). Those of a GPU are received into host memory, and copied
before the layers run next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import PeerError
from launcher.contract.optim.rates import learning_rate
from launcher.contract.records import REPLICATED, SERVER
from launcher.runtime.api import (
    FragmentReader,
    GlobalFragment,
    Handle,
    RankContext,
    Root,
    StepOutcome,
    Update,
    Waiting,
    slice_of,
)
from launcher.runtime.checkpoint.fragments import fill_frozen, frozen_weights, state_name
from launcher.runtime.train.gradient_buckets import Bucket, BucketedUpdate, unflatten
from launcher.runtime.train.optimizer import clip_factor, not_finite, squared_norm
from launcher_plugins.architectures.parameter_server.config import settings_of
from launcher_plugins.architectures.parameter_server.runtime.codec import ErrorFeedback, codec_of
from launcher_plugins.architectures.parameter_server.runtime.messages import (
    DONE,
    LEAVE,
    PUSH,
    SUM,
    SYNC,
    Connections,
    ControlMessage,
    Reply,
    wait_for,
)
from launcher_plugins.architectures.parameter_server.runtime.shard import ParameterLayout


def update(ctx: RankContext) -> Update:
    """The update of a worker. Collective over all ranks, servers included."""
    worker = ParameterServerUpdate(ctx)
    ctx.replicas = worker
    return worker


@dataclass(eq=False)
class Pulled:
    """Parameters of a bucket that are pulled."""

    buffer: Tensor
    """Where they are received: the model's own memory, or, for a GPU, host memory."""
    params: list[nn.Parameter]
    receives: list[Any]
    """Under way; empty: the model has the newest parameters."""


class ParameterServerUpdate(BucketedUpdate):
    """The update and the `Replicas` of a worker."""

    loss_scale = 1.0

    def __init__(self, ctx: RankContext) -> None:
        config = ctx.config
        self._settings = settings_of(config)
        super().__init__(ctx, self._push_bucket if self._settings.overlap else None)
        self._connections, self._feedback = Connections(ctx), ErrorFeedback(codec_of(ctx))
        self._is_cuda = ctx.device.type == "cuda"
        self._pulled: list[Pulled] = []
        self._ready: list[tuple[Any, Callable[[], None]]] = []
        """Sends that wait for a copy to the host, with the event of the copy."""
        # A hook inside a compiled layer would break its graph.
        self._pulls_by_layer = self._settings.overlap and config.fusion.compile == "none"
        self._is_initialised = False
        """Whether the servers have the layout and the first weights."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether each worker's gradient is an update of its own."""
        return not self._settings.is_lockstep

    def prepare(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Takes over the parameters; returns the modules to run."""
        for chunk in chunks:
            self._buckets.add_chunk(chunk)
        buckets, num_servers = self._buckets.all(), self._settings.servers
        pulled_with: dict[nn.Parameter, Pulled] = {}
        for bucket in buckets:
            pulled = Pulled(self._receive_buffer(bucket), bucket.params, [])
            self._pulled.append(pulled)
            pulled_with |= dict.fromkeys(bucket.params, pulled)
        self._index_of = {bucket.flat.data_ptr(): index for index, bucket in enumerate(buckets)}
        for chunk in chunks if self._pulls_by_layer else ():
            for module in chunk.modules():
                params = [param for param in module.parameters() if param in pulled_with]
                needed = list(dict.fromkeys(pulled_with[param] for param in params))
                if module is not chunk and needed:
                    module.register_forward_pre_hook(lambda *_, needed=needed: self._wait_for(needed))
        slices = (tuple(map(slice_of, bucket.params)) for bucket in buckets)
        held = (param for chunk in chunks for param in chunk.parameters())
        self._frozen = [param for param in held if not param.requires_grad]
        self._layout = ParameterLayout(
            buckets=tuple(slices),
            num_servers=num_servers,
            frozen=tuple((slice_of(param), str(param.dtype).split(".")[1]) for param in self._frozen),
        )
        self._first_buckets = [
            min(self._layout.buckets_of(server), default=None) for server in range(num_servers)
        ]
        return chunks

    def begin(self, step: int) -> None:
        """Waits for the parameters, unless each layer waits for its own."""
        self._initialise_servers()
        if not self._pulls_by_layer:
            self._wait_for(self._pulled)

    def backward(self, out: Root | None, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        """Backward of one microbatch; in the last one full buckets are pushed to the servers."""
        self._wait_for(self._pulled)  # of layers that did not run
        super().backward(out, grad, chunk=chunk, last=last)

    def apply(self, step: int) -> StepOutcome:
        """Pushes the remaining gradients, and receives the norm."""
        optim, clock = self._ctx.config.optim, self._ctx.clock
        if not self._settings.overlap:
            for bucket in self._buckets.all():
                self._push_bucket(bucket.flat)
        with clock.section(REPLICATED):
            norm, factor = self._own_norm(step) if self.is_asynchronous else (0.0, 1.0)
        with clock.section(SERVER), self._watched():
            self._send_ready(wait=True)
            received = self._ctx.stop.received if self._ctx.stop else 0
            reply = self._connections.post_reply(2)
            self._send_to_all(ControlMessage(kind=DONE, step=step, value=factor, signal=received))
            wait_for(self._connections.sends)
            summed_norm, signal = reply()
        if not self.is_asynchronous:
            norm = summed_norm
            if not isfinite(norm):
                raise not_finite(step, norm)
        if self._ctx.stop:
            self._ctx.stop.agreed = int(signal)
        self._buckets.wait()
        self._buckets.clear()
        lr = learning_rate(optim, step, self._ctx.config.train.num_steps)
        return StepOutcome(grad_norm=norm, lr=lr * self._settings.lr_factor(self._connections.num_workers))

    def state(self) -> Iterator[GlobalFragment]:
        """Nothing: the servers have the state."""
        yield from ()

    def load(self, read: FragmentReader) -> None:
        """Reads the weights; the servers read the rest."""
        fill_frozen(frozen_weights(self._frozen), read)
        for pulled in self._pulled:
            for param in pulled.params:
                where = slice_of(param)
                with torch.no_grad():
                    param.copy_(read(state_name("weight", where.name), where.offset, where.shape))

    # Communication with the other workers.

    def sum(self, value: Tensor) -> Handle:
        """Starts summing a number over the workers, through the first server."""
        with self._watched():
            event, host = self._to_host(value)

            def send() -> None:
                self._connections.send_control(0, ControlMessage(kind=SUM, value=float(host)))

            self._ready.append((event, send))
            self._send_ready(wait=False)
            return Waiting(partial(self._wait_for_sum, value, self._connections.post_reply(1)))

    def _wait_for_sum(self, value: Tensor, reply: Reply) -> None:
        """Waits for the sum and writes it into ``value``."""
        with self._ctx.clock.section(SERVER), self._watched():
            self._send_ready(wait=True)
            value.fill_(reply()[0])

    def synchronize(self) -> None:
        """Waits for the other workers, then pulls the parameters once more, the same on all."""
        if not self._is_initialised:
            return
        self._wait_for(self._pulled)
        if self.is_asynchronous:
            with self._watched():
                for index in range(len(self._pulled)):
                    self._post_pulls(index)
                self._send_to_all(ControlMessage(kind=SYNC))
            self._wait_for(self._pulled)

    def leave(self, num_done: int) -> None:
        """Waits for the last parameters, and tells every server that this worker ends."""
        self._wait_for(self._pulled)
        signal = self._ctx.stop.agreed if self._ctx.stop else 0
        self._initialise_servers()
        with self._watched():
            self._send_to_all(ControlMessage(kind=LEAVE, step=num_done, signal=signal))
            wait_for(self._connections.sends)

    def _send_to_all(self, message: ControlMessage) -> None:
        for server in range(self._connections.num_servers):
            self._connections.send_control(server, message)

    def _initialise_servers(self) -> None:
        """The first worker once sends the servers the layout and its initial weights."""
        was_initialised, self._is_initialised = self._is_initialised, True
        if was_initialised or self._ctx.plan.rank != 0:
            return
        with self._watched():
            self._connections.send_layout(self._layout)
            for index, bucket in enumerate(self._buckets.all()):
                flat = torch.cat([param.detach().flatten() for param in bucket.params]).cpu()
                for server, span in self._layout.parts_of(index):
                    self._connections.push(server, index, flat[span])
            for index, param in enumerate(self._frozen, len(self._pulled)):
                self._connections.push(0, index, param.detach().contiguous().cpu())
            wait_for(self._connections.sends)

    # Push of gradients.

    def _push_bucket(self, flat: Tensor) -> None:
        """Pushes a bucket, and posts the receives of its parameters."""
        index = self._index_of[flat.data_ptr()]
        with self._watched():
            self._post_pulls(index)
            for server, span in self._layout.parts_of(index):
                if index == self._first_buckets[server]:
                    self._connections.send_control(server, ControlMessage(kind=PUSH))
                event, host = self._to_host(self._feedback.pack(flat[span], (index, server)))
                push = partial(self._connections.push, server, index, host)
                self._ready.append((event, push))
            self._send_ready(wait=False)

    def _to_host(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """A tensor in host memory, and the event of its copy; None: it is already there."""
        if not self._is_cuda:
            return None, tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event, host

    def _send_ready(self, *, wait: bool) -> None:
        """Sends, in order, what is in host memory; ``wait``: all, once it is copied."""
        while self._ready:
            event, send = self._ready[0]
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()
            send()
            self._ready.pop(0)

    def _own_norm(self, step: int) -> tuple[float, float]:
        """Norm of this worker's gradient, and the factor that clips it."""
        norm = float(squared_norm([bucket.flat for bucket in self._buckets.all()]).sqrt())
        if not isfinite(norm):
            raise not_finite(step, norm, is_own=True)
        return norm, clip_factor(norm, self._ctx.config.optim.clip_norm)

    # Pull of parameters.

    def _receive_buffer(self, bucket: Bucket) -> Tensor:
        if self._is_cuda:
            dtype = bucket.params[0].dtype
            return torch.empty(bucket.flat.numel(), dtype=dtype, pin_memory=True)
        buffer = torch.cat([param.detach().flatten() for param in bucket.params])
        for param, view in zip(bucket.params, unflatten(buffer, bucket.params), strict=True):
            param.data = view
        return buffer

    def _post_pulls(self, index: int) -> None:
        pulled = self._pulled[index]
        if not self._is_cuda:
            torch.autograd.graph.increment_version(pulled.params)
        for server, span in self._layout.parts_of(index):
            pulled.receives.append(self._connections.post_pull(server, index, pulled.buffer[span]))

    @torch.no_grad()
    def _wait_for(self, wanted: Sequence[Pulled]) -> None:
        """Waits for parameters that are under way, and copies a GPU's into the model."""
        awaited = [pulled for pulled in wanted if pulled.receives]
        if not awaited:
            return
        with self._ctx.clock.section(SERVER):
            for pulled in awaited:
                with self._watched():
                    for receive in pulled.receives:
                        receive.wait()
                pulled.receives = []
                if self._is_cuda:
                    views = unflatten(pulled.buffer, pulled.params)
                    for param, view in zip(pulled.params, views, strict=True):
                        param.copy_(view, non_blocking=True)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, a broken connection raises the error of a failed server."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PeerError(
                f"a parameter server does not answer, so this worker cannot continue: {error}. The server's "
                "log has the reason; `trireme run ... --resume` continues from the newest checkpoint"
            ) from error
