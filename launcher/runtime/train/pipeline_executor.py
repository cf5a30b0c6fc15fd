"""Runs a rank's action list: the interpreter of every pipeline schedule.

It knows no schedule. It executes the actions of a list in their order (see
`launcher.contract.actions`), with three guarantees:

- A receive is posted where it stands in the list, ahead of the forward or backward that needs it,
  into a buffer of a pool: after the first step nothing is allocated for messages.
- A send does not block compute: it is waited for once later ones have been started, or at the end of the
  step. A stage's output is freed then; its backward needs only the graph that produced it.
- The tensors of a microbatch are freed as soon as its backward is done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from launcher.base.errors import JobError
from launcher.contract.actions import RB, RF, SENDS_IN_FLIGHT, SF, Action, B, F, PipelineShape, W
from launcher.contract.records import OTHER, PIPELINE
from launcher.runtime.api import Handle, Root, Transport, Update
from launcher.runtime.measure.clock import Clock
from launcher.runtime.model.deferred_weight_gradients import DeferredWeightGradient, SplitBackward

Key = tuple[str, int, int]
"""Kind, stage and microbatch of the action that receives a message."""


class BufferPool:
    """Receive buffers by shape, reused from step to step."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._free: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        self.num_allocated = 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """A buffer whose content is undefined."""
        if free := self._free[shape]:
            return free.pop()
        self.num_allocated += 1
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def put_back(self, *buffers: Tensor | None) -> None:
        """Returns buffers to the pool."""
        for buffer in buffers:
            if buffer is not None:
                self._free[buffer.shape].append(buffer)


@dataclass(frozen=True, kw_only=True)
class PipelinePart:
    """One rank's part of a pipeline."""

    shape: PipelineShape
    modules: Mapping[int, nn.Module]
    """The rank's stages: (input or None on stage 0, microbatch) -> output; the last stage returns
    the sum of its losses."""
    actions: Sequence[Action]
    input_shapes: Mapping[int, tuple[int, ...]]
    """Local shape of one microbatch's input, for every stage of the model but the first."""
    deferral: SplitBackward
    """Collects the weight gradients that the modules' backwards defer."""
    dtype: torch.dtype
    """Number format of the messages."""
    device: torch.device


@dataclass(frozen=True)
class _Forwarded:
    """What a stage keeps of one microbatch between its forward and its backward."""

    root: Root | None
    """Where its backward begins; None where nothing needs a gradient."""
    input: Tensor | None
    """The leaf that collects the input's gradient, where anything before is trained; None on stage 0."""
    buffer: Tensor | None
    """The pool's buffer under ``input``; None where the previous stage is on this rank."""


_NOTHING = _Forwarded(None, None, None)
"""Of a stage that no gradient reaches."""


@dataclass(frozen=True)
class _Deferred:
    """What a split backward (B) leaves to its W."""

    gradients: list[DeferredWeightGradient]
    buffers: tuple[Tensor | None, ...]
    """The pool's buffers that the gradients may still read."""


@dataclass
class Step:
    """The state of one step, and what comes of it."""

    receives: dict[Key, tuple[Handle, Tensor]] = field(default_factory=dict)
    arrived: dict[Key, Tensor] = field(default_factory=dict)
    """Messages from one stage of this rank to another."""
    outgoing: dict[Key, Tensor] = field(default_factory=dict)
    """Computed, to be sent by a later action."""
    sends: deque[tuple[Handle, Tensor]] = field(default_factory=deque)
    """Under way, in the order in which they were started. Each keeps its tensor alive."""
    forwarded: dict[tuple[int, int], _Forwarded] = field(default_factory=dict)
    deferred: dict[tuple[int, int], _Deferred] = field(default_factory=dict)
    loss_sum: Tensor | None = None
    """Sum of the losses of this replica's microbatches; None away from the last stage."""
    num_receives: int = 0
    """Messages received from other ranks."""


LossFactor = Callable[[], float | Tensor]


class PipelineExecutor:
    """Interprets the action list of one rank, step after step."""

    def __init__(self, part: PipelinePart, transport: Transport | None, clock: Clock) -> None:
        self._part, self._transport, self._clock = part, transport, clock
        self._last_stage = part.shape.num_stages - 1
        self._between = OTHER if transport is None else PIPELINE
        """The clock's kind of the time between two computations."""
        self._last = {(a.kind, a.stage): index for index, a in enumerate(part.actions)}
        """Index in the list of a stage's last action of each kind."""
        self.pool = BufferPool(part.dtype, part.device)

    def train(self, microbatches: Sequence[Any], update: Update, loss_scale: LossFactor) -> Step:
        """One step's forwards and backwards.

        The sum of losses is multiplied by ``loss_scale()`` before its backward: 1 / (targets in the global
        batch) gives the gradient of the mean. It is called once there is a loss.
        """
        step = Step()
        with self._clock.section(self._between):
            for index, action in enumerate(self._part.actions):
                last = index == self._last[action.kind, action.stage]
                if action.kind == F:
                    self._forward(action, microbatches[action.microbatch], step, loss_scale)
                elif action.kind == B:
                    self._backward(action, step, update, last=last)
                elif action.kind == W:
                    self._backward_weight(action, step, update, last=last)
                elif action.kind in (RF, RB):
                    self._post_receive(action, step)
                else:
                    self._start_send(action, step)
            self._finish(step)
        return step

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any]) -> Tensor | None:
        """The forwards alone, in the schedule's order; returns the sum of losses on the last stage."""
        step = Step()
        for action in self._part.actions:
            if action.kind == F:
                self._forward(action, microbatches[action.microbatch], step, loss_scale=None)
            elif action.kind == RF:
                self._post_receive(action, step)
            elif action.kind == SF:
                self._start_send(action, step)
        self._finish(step)
        return step.loss_sum

    def _forward(self, action: Action, microbatch: Any, step: Step, loss_scale: LossFactor | None) -> None:
        """``loss_scale`` None: no backward follows, and nothing is kept for it."""
        stage, _, index = action
        leaf, buffer = None, None
        if stage > 0:
            message, buffer = self._receive((RF, stage, index), step)
            leaf = message.detach()
            leaf.requires_grad_(loss_scale is not None and stage > self._part.shape.num_frozen)
        with self._clock.action():
            output: Tensor = self._part.modules[stage](leaf, microbatch)
            if stage == self._last_stage:
                loss = output.detach()
                step.loss_sum = loss.clone() if step.loss_sum is None else step.loss_sum + loss
                output = output if loss_scale is None else output * loss_scale()
        if loss_scale is not None and stage >= self._part.shape.num_frozen:
            step.forwarded[stage, index] = _Forwarded(_root(output), leaf, buffer)
        else:
            if buffer is not None and _share_storage(output, buffer):
                output = output.clone()  # the buffer is reused before this output is read
            self.pool.put_back(buffer)
        if stage < self._last_stage:
            self._deliver((RF, stage + 1, index), output.detach(), step)

    def _backward(self, action: Action, step: Step, update: Update, *, last: bool) -> None:
        stage, _, index = action
        grad, grad_buffer = None, None
        is_frozen = stage < self._part.shape.num_frozen
        if stage < self._last_stage and not is_frozen:
            grad, grad_buffer = self._receive((RB, stage, index), step)
        forwarded = _NOTHING if is_frozen else step.forwarded.pop((stage, index))
        buffers = grad_buffer, forwarded.buffer
        chunk, deferral = self._part.shape.chunk(stage), self._part.deferral
        with self._clock.action(is_backward=True):
            if deferral.is_enabled:
                with deferral.collecting() as gradients:
                    update.backward(forwarded.root, grad, chunk=chunk, last=last)
                step.deferred[stage, index] = _Deferred(gradients, buffers)
            else:
                update.backward(forwarded.root, grad, chunk=chunk, last=last)
        if forwarded.input is not None and forwarded.input.requires_grad:
            input_grad = forwarded.input.grad
            if input_grad is None:  # its layers took another path than the measured one
                input_grad = torch.zeros_like(forwarded.input)
            if grad_buffer is not None and _share_storage(input_grad, grad_buffer):
                input_grad = input_grad.clone()  # the buffer is reused before this has been sent
            self._deliver((RB, stage - 1, index), input_grad, step)
        if not deferral.is_enabled:
            self.pool.put_back(*buffers)

    def _backward_weight(self, action: Action, step: Step, update: Update, *, last: bool) -> None:
        stage, _, index = action
        deferred = step.deferred.pop((stage, index))
        with self._clock.action():
            update.backward_weight(deferred.gradients, chunk=self._part.shape.chunk(stage), last=last)
        self.pool.put_back(*deferred.buffers)

    def _deliver(self, key: Key, message: Tensor, step: Step) -> None:
        """Passes a result to its stage: at once when that is on this rank, else by the coming send."""
        (step.arrived if key[1] in self._part.modules else step.outgoing)[key] = message

    def _receive(self, key: Key, step: Step) -> tuple[Tensor, Tensor | None]:
        """Waits for a message; returns it, and its pool buffer when it came from another rank."""
        if key in step.arrived:
            return step.arrived.pop(key), None
        handle, buffer = step.receives.pop(key)
        handle.wait()
        step.num_receives += 1
        return buffer, buffer

    def _post_receive(self, action: Action, step: Step) -> None:
        stage, kind, index = action
        shape, source = (stage, stage - 1) if kind == RF else (stage + 1, stage + 1)
        key = (kind, stage, index)
        buffer = self.pool.take(self._part.input_shapes[shape])
        handle = self._required_transport.receive(buffer, self._part.shape.pp_rank(source), self._tag(key))
        step.receives[key] = handle, buffer

    def _start_send(self, action: Action, step: Step) -> None:
        stage, kind, index = action
        key = (RF, stage + 1, index) if kind == SF else (RB, stage - 1, index)
        message = step.outgoing.pop(key).contiguous()
        self._check_shape(message, key)
        handle = self._required_transport.send(message, self._part.shape.pp_rank(key[1]), self._tag(key))
        step.sends.append((handle, message))
        if len(step.sends) > SENDS_IN_FLIGHT:
            oldest, _ = step.sends.popleft()
            oldest.wait()

    def _check_shape(self, message: Tensor, key: Key) -> None:
        """The receiver's buffer is as planned: with another message it would hang or hold wrong values."""
        kind, stage, _ = key
        boundary = stage if kind == RF else stage + 1
        expected = self._part.input_shapes[boundary]
        if message.dtype != self._part.dtype or message.shape != expected:
            raise JobError(
                f"stage {boundary - 1} sends {tuple(message.shape)} {message.dtype}, planned is {expected} "
                f"{self._part.dtype}: its layers must return the planned shapes and precision"
            )

    def _finish(self, step: Step) -> None:
        while step.sends:
            handle, _ = step.sends.popleft()
            handle.wait()

    @property
    def _required_transport(self) -> Transport:
        assert self._transport is not None, "the schedule has messages, but no transport was set"
        return self._transport

    def _tag(self, key: Key) -> int:
        """A tag that no other message of the step has; sender and receiver compute the same."""
        kind, stage, index = key
        return (stage * self._part.shape.num_microbatches + index) * 2 + (kind == RB)


def _root(output: Tensor) -> Root | None:
    if not output.requires_grad:
        return None
    return output if output.dim() == 0 else get_gradient_edge(output)


def _share_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
