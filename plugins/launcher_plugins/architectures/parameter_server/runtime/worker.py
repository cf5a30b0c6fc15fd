"""A worker: pushes its gradients to the servers bucket by bucket, and pulls the parameters that they make.

    last backward   | .. B | .. B | .. B |     each bucket leaves as it is filled
    apply           | all pushed | norm comes back
    next forward    | F .. | F .. | F .. |     each layer waits for its own parameters alone

Servers may answer while the backward still runs: a bucket's parameters land in the model itself, which by
then has used the old ones (autograd adds to a parameter's gradient when all that needed its value is done,
and refuses to go on where some layer has hidden a use from it). A GPU's land in the host's memory, and are
copied when the layers are next run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import JobError
from launcher.contract.records import REPLICATED, SERVER
from launcher.runtime.api import (
    DTYPES,
    FragmentReader,
    GlobalFragment,
    Handle,
    RankContext,
    Root,
    StepOutcome,
    Update,
    slice_of,
)
from launcher.runtime.checkpoint.fragments import state_name
from launcher.runtime.model.split_backward import WeightProduct
from launcher.runtime.train.gradients import Bucket, GradientBuckets
from launcher.runtime.train.optimizer import learning_rate, not_finite
from launcher_plugins.architectures.parameter_server.config import settings_of
from launcher_plugins.architectures.parameter_server.runtime.codec import Feedback, codec_of
from launcher_plugins.architectures.parameter_server.runtime.wire import (
    DONE,
    LEAVE,
    MEET,
    PUSH,
    SUM,
    Answer,
    Held,
    Layout,
    Notice,
    Outbox,
    Wire,
)


def update(ctx: RankContext) -> Update:
    """The update of a worker. Collective over all ranks, servers included."""
    worker = ParameterServerUpdate(ctx)
    ctx.replicas = worker
    return worker


@dataclass
class Pulled:
    """Parameters of a bucket on their way."""

    landing: Tensor
    """Where they arrive: the model's own memory, or, for a GPU, the host's."""
    params: list[nn.Parameter]
    receives: list[Any]
    """Those that are under way; empty: the model has the newest."""


class ParameterServerUpdate:
    """The update, and the `Replicas`, of a worker."""

    loss_scale = 1.0

    def __init__(self, ctx: RankContext) -> None:
        config = ctx.config
        self._ctx, self._settings = ctx, settings_of(config)
        self._wire, self._outbox, self._feedback = Wire(ctx), Outbox(), Feedback(codec_of(ctx))
        self._is_cuda = ctx.device.type == "cuda"
        self._buckets = GradientBuckets(
            dtype=DTYPES[config.precision.gradients],
            bucket_bytes=config.parallel.bucket_bytes,
            exchange=self._leave_with if self._settings.overlap else None,
        )
        self._pulled: list[Pulled] = []
        self._ready: list[tuple[Any, Callable[[], None]]] = []
        """What is to be sent and is being copied to the host, with the event of the copy."""
        # A hook inside a compiled layer would break it up.
        self._pulls_by_layer = self._settings.overlap and config.fusion.compile == "none"
        self._is_known = False
        """Whether the servers know what they hold."""

    @property
    def steps_alone(self) -> bool:
        """Whether each worker's gradient is an update of its own."""
        return not self._settings.is_lockstep

    def prepare(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Takes over the parameters; returns the modules to run."""
        for chunk in chunks:
            self._buckets.add_chunk(chunk)
        places: dict[nn.Parameter, Pulled] = {}
        for bucket in self._buckets.all():
            pulled = Pulled(self._landing(bucket), bucket.params, [])
            self._pulled.append(pulled)
            places |= dict.fromkeys(bucket.params, pulled)
        self._place_of = {bucket.flat.data_ptr(): place for place, bucket in enumerate(self._buckets.all())}
        for chunk in chunks if self._pulls_by_layer else ():
            for module in chunk.modules():
                held = {id(places[param]): places[param] for param in module.parameters() if param in places}
                if module is not chunk and held:
                    module.register_forward_pre_hook(self._taker(list(held.values())))
        self._layout = Layout(
            buckets=tuple(tuple(map(_held, bucket.params)) for bucket in self._buckets.all()),
            num_servers=self._settings.servers,
        )
        self._first_places = [
            min(self._layout.pieces(server), default=None) for server in range(self._settings.servers)
        ]
        return chunks

    def begin(self, step: int) -> None:
        """Waits for the parameters, unless each layer waits for its own."""
        if not self._is_known:
            self._is_known = True
            self._introduce()
        if not self._pulls_by_layer:
            self._take(self._pulled)

    def backward(self, out: Root | None, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        """Backward of one microbatch; in the last one full buckets leave for the servers."""
        self._take(self._pulled)  # some layer may not have run
        is_final = last and not self._ctx.split_backward.is_enabled
        self._buckets.backward(out, grad, chunk=chunk, last=is_final)

    def finish_backward(self, products: Sequence[WeightProduct], *, chunk: int, last: bool) -> None:
        """The weight gradients that a split backward has put off."""
        self._buckets.finish_backward(products, chunk=chunk, last=last)

    def apply(self, step: int) -> StepOutcome:
        """Sees all gradients off, and hears what became of them."""
        optim, clock = self._ctx.config.optim, self._ctx.clock
        if not self._settings.overlap:
            for bucket in self._buckets.all():
                self._leave_with(bucket.flat)
        with clock.section(REPLICATED):
            norm, factor = self._own_norm(step) if self.steps_alone else (0.0, 1.0)
        with clock.section(SERVER), self._watched():
            self._send_ready(wait=True)
            told = self._ctx.stop.received if self._ctx.stop else 0
            notice = Notice(kind=DONE, step=step, value=factor, signal=told)
            answer = self._wire.post_answer(2)
            for server in range(self._wire.num_servers):
                self._wire.notify(server, notice, self._outbox)
            self._outbox.wait()
            summed_norm, signal = answer.wait()
        if not self.steps_alone:
            norm = summed_norm
            if not isfinite(norm):
                raise not_finite(step, norm)
        if self._ctx.stop:
            self._ctx.stop.agreed = int(signal)
        self._buckets.wait()
        self._buckets.clear()
        lr = learning_rate(optim, step, self._ctx.config.train.num_steps)
        return StepOutcome(grad_norm=norm, lr=lr * self._settings.lr_factor(self._wire.num_workers))

    def state(self) -> Iterator[GlobalFragment]:
        """Nothing: the servers hold it."""
        yield from ()

    def load(self, read: FragmentReader) -> None:
        """The weights; what else was saved the servers read."""
        for pulled in self._pulled:
            for param in pulled.params:
                where = slice_of(param)
                with torch.no_grad():
                    param.copy_(read(state_name("weight", where.name), where.offset, where.shape))

    def close(self) -> None:
        """Nothing is under way any more."""

    # What the workers do together.

    def sum(self, value: Tensor) -> Handle:
        """Starts adding a number up over the workers, through the first server."""
        with self._watched():
            event, host = self._to_host(value)
            self._ready.append((event, lambda: self._ask_for_sum(float(host))))
            self._send_ready(wait=False)
            return _Sum(self, value, self._wire.post_answer(1))

    def _ask_for_sum(self, value: float) -> None:
        self._wire.notify(0, Notice(kind=SUM, value=value), self._outbox)

    def wait_for_sum(self, value: Tensor, answer: Answer) -> None:
        """Puts it in."""
        with self._ctx.clock.section(SERVER), self._watched():
            self._send_ready(wait=True)
            value.fill_(answer.wait()[0])

    def meet(self) -> None:
        """Waits until every worker is here; then pulls the parameters once more, the same as the others."""
        if not self._is_known:
            return
        self._take(self._pulled)
        if self.steps_alone:
            for place in range(len(self._pulled)):
                self._post_pulls(place)
            for server in range(self._wire.num_servers):
                self._wire.notify(server, Notice(kind=MEET), self._outbox)
            self._take(self._pulled)

    def leave(self, num_done: int) -> None:
        """Takes the last parameters, and says good-bye to every server."""
        self._take(self._pulled)
        told = self._ctx.stop.agreed if self._ctx.stop else 0
        if not self._is_known:
            self._introduce()
        with self._watched():
            for server in range(self._wire.num_servers):
                self._wire.notify(server, Notice(kind=LEAVE, step=num_done, signal=told), self._outbox)
            self._outbox.wait()

    def _introduce(self) -> None:
        """The first worker tells the servers what they hold, and its first weights."""
        if self._ctx.plan.rank != 0:
            return
        with self._watched():
            self._wire.tell_layout(self._layout, self._outbox)
            for place, bucket in enumerate(self._buckets.all()):
                flat = torch.cat([param.detach().flatten() for param in bucket.params]).cpu()
                for server in self._layout.owners(place):
                    start, stop = self._layout.span(place, server)
                    self._wire.push(server, place, flat[start:stop], self._outbox)
            self._outbox.wait()

    # Gradients out.

    def _leave_with(self, flat: Tensor) -> _Gone:
        """Pushes a bucket, and expects its parameters."""
        place = self._place_of[flat.data_ptr()]
        self._post_pulls(place)
        for server in self._layout.owners(place):
            start, stop = self._layout.span(place, server)
            if place == self._first_places[server]:
                self._wire.notify(server, Notice(kind=PUSH), self._outbox)
            self._push(server, place, self._feedback.pack(flat[start:stop], (place, server)))
        self._send_ready(wait=False)
        return _Gone()

    def _push(self, server: int, place: int, packed: Tensor) -> None:
        """Sends from the host's memory; from a GPU once the copy is there, which nothing waits for here."""
        event, host = self._to_host(packed)
        self._ready.append((event, lambda: self._wire.push(server, place, host, self._outbox)))

    def _to_host(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """A tensor in the host's memory, and the event that says when it is there; None: it is."""
        if not self._is_cuda:
            return None, tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event, host

    def _send_ready(self, *, wait: bool) -> None:
        """Sends, in order, what has arrived in the host's memory; ``wait``: all of it."""
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
        squares = [torch.linalg.vector_norm(b.flat, dtype=torch.float32) for b in self._buckets.all()]
        norm = float(torch.stack(squares).double().square().sum().sqrt())
        if not isfinite(norm):
            raise not_finite(step, norm)
        clip_norm = self._ctx.config.optim.clip_norm
        return norm, 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))

    # Parameters in.

    def _landing(self, bucket: Bucket) -> Tensor:
        if self._is_cuda:
            dtype = bucket.params[0].dtype
            return torch.empty(bucket.flat.numel(), dtype=dtype, pin_memory=True)
        landing = torch.cat([param.detach().flatten() for param in bucket.params])
        for param, part in zip(bucket.params, _parts(landing, bucket.params), strict=True):
            param.data = part
        return landing

    def _post_pulls(self, place: int) -> None:
        pulled = self._pulled[place]
        if not self._is_cuda:
            torch.autograd.graph.increment_version(pulled.params)
        for server in self._layout.owners(place):
            start, stop = self._layout.span(place, server)
            pulled.receives.append(self._wire.post_pull(server, place, pulled.landing[start:stop]))

    def _taker(self, pulled: Sequence[Pulled]) -> Callable[..., None]:
        """What a layer does before its forward."""
        return lambda *_: self._take(pulled)

    @torch.no_grad()
    def _take(self, wanted: Sequence[Pulled]) -> None:
        """Waits for parameters that are under way, and puts them into the model."""
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
                    parts = _parts(pulled.landing, pulled.params)
                    for param, part in zip(pulled.params, parts, strict=True):
                        param.copy_(part, non_blocking=True)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, a connection that breaks is told as what it is."""
        try:
            yield
        except RuntimeError as error:
            raise JobError(
                f"a parameter server does not answer, so this worker cannot go on: {error}. Its own log "
                "tells why; `trireme run ... --resume` goes on from the newest checkpoint"
            ) from error


class _Gone:
    """A bucket that has left; nobody waits for it before the step ends."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True)
class _Sum:
    """A sum that the first server makes."""

    worker: ParameterServerUpdate
    value: Tensor
    answer: Answer

    def wait(self) -> None:
        """Returns when the value is the sum."""
        self.worker.wait_for_sum(self.value, self.answer)


def _parts(flat: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """A view for each parameter, in its shape."""
    parts = torch.split(flat, [param.numel() for param in params])
    return [part.view_as(param) for part, param in zip(parts, params, strict=True)]


def _held(param: nn.Parameter) -> Held:
    where = slice_of(param)
    return Held(name=where.name, shape=where.shape)
