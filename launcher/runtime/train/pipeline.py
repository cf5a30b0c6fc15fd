"""Runs a rank's action list: the interpreter of every pipeline schedule.

It knows no schedule. Whatever order the list has, it does what each action says (see
`launcher.contract.actions`), and keeps three promises:

- A receive is posted where it stands in the list, ahead of the forward or backward that needs it,
  into a buffer of a pool: after the first step nothing is allocated for messages.
- A send does not hold up compute: it is waited for when later ones have been started, or when the step
  ends. A stage's output is let go then; the graph behind it stays, and its backward needs no more.
- What a microbatch holds is let go as soon as its backward is done.
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
from launcher.runtime.model.split_backward import SplitBackward, WeightProduct

Key = tuple[str, int, int]
"""Kind, stage and microbatch of the action that receives a message."""


class BufferPool:
    """Receive buffers by shape, used again and again."""

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

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
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
    split: SplitBackward
    """Where the modules' backwards put off their weight gradients."""
    dtype: torch.dtype
    """Number format of the messages."""
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step's forwards and backwards gave."""

    loss_sum: Tensor | None
    """Sum of the losses of this replica's microbatches; None away from the last stage."""
    num_receives: int
    """Messages waited for."""


@dataclass(frozen=True)
class _Held:
    """What one microbatch leaves on a stage between its forward and its backward."""

    root: Root | None
    """Where its backward begins; None where nothing needs a gradient."""
    input: Tensor | None
    """The leaf that collects the input's gradient; None on stage 0."""
    buffer: Tensor | None
    """The pool's buffer under ``input``; None where the previous stage is on this rank."""


@dataclass(frozen=True)
class _PutOff:
    """What a split backward leaves to its W."""

    products: list[WeightProduct]
    buffers: tuple[Tensor | None, ...]
    """The pool's buffers that the products may still read."""


@dataclass
class _Step:
    """All that is under way in one step."""

    receives: dict[Key, tuple[Handle, Tensor]] = field(default_factory=dict)
    arrived: dict[Key, Tensor] = field(default_factory=dict)
    """Messages from one stage of this rank to another."""
    outgoing: dict[Key, Tensor] = field(default_factory=dict)
    """Computed, and waiting for their send."""
    sends: deque[tuple[Handle, Tensor]] = field(default_factory=deque)
    """Under way, in the order of their start. Each keeps its tensor alive."""
    held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    put_off: dict[tuple[int, int], _PutOff] = field(default_factory=dict)
    loss_sum: Tensor | None = None
    num_receives: int = 0


LossFactor = Callable[[], float | Tensor]


class PipelineExecutor:
    """Interprets the action list of one rank, step after step."""

    def __init__(self, part: PipelinePart, transport: Transport | None, clock: Clock) -> None:
        self._part, self._transport, self._clock = part, transport, clock
        self._last_stage = part.shape.num_stages - 1
        self._between = OTHER if transport is None else PIPELINE
        """What the time between two computations goes to."""
        self._last = {(a.kind, a.stage): place for place, a in enumerate(part.actions)}
        """Where in the list a stage has its last action of each kind."""
        self.pool = BufferPool(part.dtype, part.device)

    def train(self, microbatches: Sequence[Any], update: Update, loss_scale: LossFactor) -> StepResult:
        """One step's forwards and backwards.

        What ``loss_scale`` gives, once a loss is there, multiplies the sum of losses before its backward:
        1 / (targets in the global batch) gives the gradient of the mean.
        """
        step = _Step()
        with self._clock.section(self._between):
            for place, action in enumerate(self._part.actions):
                last = place == self._last[action.kind, action.stage]
                if action.kind == F:
                    self._forward(action, microbatches[action.microbatch], step, loss_scale)
                elif action.kind == B:
                    self._backward(action, step, update, last=last)
                elif action.kind == W:
                    self._finish_backward(action, step, update, last=last)
                elif action.kind in (RF, RB):
                    self._post_receive(action, step)
                else:
                    self._start_send(action, step)
            self._finish(step)
        return StepResult(loss_sum=step.loss_sum, num_receives=step.num_receives)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any]) -> Tensor | None:
        """The forwards alone, in the schedule's order; returns the sum of losses on the last stage."""
        step = _Step()
        for action in self._part.actions:
            if action.kind == F:
                self._forward(action, microbatches[action.microbatch], step, loss_scale=None)
            elif action.kind == RF:
                self._post_receive(action, step)
            elif action.kind == SF:
                self._start_send(action, step)
        self._finish(step)
        return step.loss_sum

    def _forward(self, action: Action, microbatch: Any, step: _Step, loss_scale: LossFactor | None) -> None:
        """``loss_scale`` None: no backward will follow, so nothing is held."""
        stage, _, index = action
        leaf, buffer = None, None
        if stage > 0:
            message, buffer = self._take((RF, stage, index), step)
            leaf = message.detach().requires_grad_(loss_scale is not None)
        with self._clock.action():
            output: Tensor = self._part.modules[stage](leaf, microbatch)
            if stage == self._last_stage:
                loss = output.detach()
                step.loss_sum = loss.clone() if step.loss_sum is None else step.loss_sum + loss
                output = output if loss_scale is None else output * loss_scale()
        if loss_scale is not None:
            step.held[stage, index] = _Held(_root(output), leaf, buffer)
        else:
            if buffer is not None and _share_storage(output, buffer):
                output = output.clone()  # the buffer is used again before this output is
            self._let_go((buffer,))
        if stage < self._last_stage:
            self._pass_on((RF, stage + 1, index), output.detach(), step)

    def _backward(self, action: Action, step: _Step, update: Update, *, last: bool) -> None:
        stage, _, index = action
        grad, grad_buffer = None, None
        if stage < self._last_stage:
            grad, grad_buffer = self._take((RB, stage, index), step)
        held = step.held.pop((stage, index))
        buffers = grad_buffer, held.buffer
        chunk, split = self._chunk(stage), self._part.split
        with self._clock.action(is_backward=True):
            if split.is_enabled:
                with split.collecting() as products:
                    update.backward(held.root, grad, chunk=chunk, last=last)
                step.put_off[stage, index] = _PutOff(products, buffers)
            else:
                update.backward(held.root, grad, chunk=chunk, last=last)
        if held.input is not None:
            input_grad = held.input.grad
            assert input_grad is not None, f"stage {stage} gave its input no gradient"
            if grad_buffer is not None and _share_storage(input_grad, grad_buffer):
                input_grad = input_grad.clone()  # the buffer is used again before this has been sent
            self._pass_on((RB, stage - 1, index), input_grad, step)
        if not split.is_enabled:
            self._let_go(buffers)

    def _finish_backward(self, action: Action, step: _Step, update: Update, *, last: bool) -> None:
        stage, _, index = action
        put_off = step.put_off.pop((stage, index))
        with self._clock.action():
            update.finish_backward(put_off.products, chunk=self._chunk(stage), last=last)
        self._let_go(put_off.buffers)

    def _let_go(self, buffers: tuple[Tensor | None, ...]) -> None:
        for buffer in buffers:
            if buffer is not None:
                self.pool.give(buffer)

    def _chunk(self, stage: int) -> int:
        return stage // self._part.shape.num_pp_ranks

    def _pass_on(self, key: Key, message: Tensor, step: _Step) -> None:
        """Hands a result to its stage: at once when that is on this rank, else to the coming send."""
        (step.arrived if key[1] in self._part.modules else step.outgoing)[key] = message

    def _take(self, key: Key, step: _Step) -> tuple[Tensor, Tensor | None]:
        """A message, waited for; and its pool buffer when it came from another rank."""
        if key in step.arrived:
            return step.arrived.pop(key), None
        handle, buffer = step.receives.pop(key)
        handle.wait()
        step.num_receives += 1
        return buffer, buffer

    def _post_receive(self, action: Action, step: _Step) -> None:
        stage, kind, index = action
        shape, source = (stage, stage - 1) if kind == RF else (stage + 1, stage + 1)
        key = (kind, stage, index)
        buffer = self.pool.take(self._part.input_shapes[shape])
        handle = self._wire.receive(buffer, self._part.shape.pp_rank(source), self._tag(key))
        step.receives[key] = handle, buffer

    def _start_send(self, action: Action, step: _Step) -> None:
        stage, kind, index = action
        key = (RF, stage + 1, index) if kind == SF else (RB, stage - 1, index)
        message = step.outgoing.pop(key).contiguous()
        self._check(message, key)
        handle = self._wire.send(message, self._part.shape.pp_rank(key[1]), self._tag(key))
        step.sends.append((handle, message))
        if len(step.sends) > SENDS_IN_FLIGHT:
            oldest, _ = step.sends.popleft()
            oldest.wait()

    def _check(self, message: Tensor, key: Key) -> None:
        """The receiver's buffer was made from the plan: anything else would be written over or hang."""
        kind, stage, _ = key
        boundary = stage if kind == RF else stage + 1
        expected = self._part.input_shapes[boundary]
        if message.dtype != self._part.dtype or message.shape != expected:
            raise JobError(
                f"stage {boundary - 1} passes on {tuple(message.shape)} {message.dtype}, planned are "
                f"{expected} {self._part.dtype}: its layers must keep the shapes and the precision that "
                "they were planned with"
            )

    def _finish(self, step: _Step) -> None:
        for handle, _ in step.sends:
            handle.wait()

    @property
    def _wire(self) -> Transport:
        assert self._transport is not None, "the schedule has messages, and no transport was set"
        return self._transport

    def _tag(self, key: Key) -> int:
        """A number that no other message of the step has; sender and receiver derive the same."""
        kind, stage, index = key
        return (stage * self._part.shape.num_microbatches + index) * 2 + (kind == RB)


def _root(output: Tensor) -> Root | None:
    if not output.requires_grad:
        return None
    return output if output.dim() == 0 else get_gradient_edge(output)


def _share_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
