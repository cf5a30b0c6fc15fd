"""The native update: accumulate in buckets, exchange, clip by the whole model's norm, update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite, nan

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.contract.optim.rates import learning_rate
from launcher.contract.records import REPLICATED
from launcher.runtime.api import (
    FragmentReader,
    GlobalFragment,
    GlobalSlice,
    RankContext,
    StepOutcome,
    slice_of,
)
from launcher.runtime.checkpoint.fragments import (
    LOSS_SCALE,
    NUM_GOOD_STEPS,
    STEP,
    WEIGHT,
    fill,
    fill_frozen,
    frozen_weights,
    owned,
    scalar_fragment,
    whole_state,
)
from launcher.runtime.train.gradient_buckets import BucketedUpdate
from launcher.runtime.train.optimizer import (
    LossScale,
    clip_factor,
    make_optimizer,
    set_learning_rate,
    set_state,
    squared_norm,
    state_shapes,
    state_tensors,
)
from launcher.runtime.train.reductions import sum_gradients_of_copies


class NativeUpdate(BucketedUpdate):
    """Each replica has the whole state of its part of the model and updates it itself."""

    def __init__(self, ctx: RankContext) -> None:
        super().__init__(ctx, ctx.exchange_gradients)
        self._masters: dict[nn.Parameter, Tensor] = {}
        """What the optimizer updates: the parameter itself, or its fp32 copy."""
        self._params: list[nn.Parameter] = []
        """All, also those that are not trained."""
        self._num_updates = 0
        self._scale = LossScale() if ctx.config.precision.compute == "fp16" else None

    def prepare(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Takes over the chunks' parameters; returns the modules to run."""
        for chunk in chunks:
            self._buckets.add_chunk(chunk)
            self._params += chunk.parameters()
            for param in chunk.parameters():
                if param.requires_grad and param not in self._masters:
                    self._masters[param] = self._master(param)
        masters = ((master, slice_of(param)) for param, master in self._masters.items())
        self._optimizer = self.make_optimizer(masters)
        return chunks

    def make_optimizer(self, tensors: Iterable[tuple[Tensor, GlobalSlice]]) -> torch.optim.Optimizer | None:
        """The optimizer of some tensors, each with the slice of its parameter; None: there are none.

        One that a subclass makes keeps by tensor in ``state`` what the configured one does.
        """
        return make_optimizer(tensors, self._ctx)

    def apply(self, step: int) -> StepOutcome:
        """Finishes the gradient exchange, clips, updates the parameters, clears the gradients."""
        config, clock = self._ctx.config, self._ctx.clock
        with clock.section("dp"):
            self._buckets.wait()
        sum_gradients_of_copies(self._ctx, list(self._masters), self._buckets.view)
        with clock.section(REPLICATED):
            scale = 1.0 if self._scale is None else self._scale.value
            norm = self._grad_norm() / scale
            overflowed = not isfinite(norm)
            lr = learning_rate(config.optim, step, config.train.num_steps)
            is_finite = not overflowed or (self._scale is not None and not self._scale.is_smallest)
            if not overflowed:
                self._num_updates += 1
                self._step_optimizer(lr, clip_factor(norm, config.optim.clip_norm) / scale)
            self._buckets.clear()
            if self._scale is not None:
                self._scale.after_step(overflowed=overflowed)
        return StepOutcome(grad_norm=norm, lr=lr, is_skipped=overflowed, is_finite=is_finite)

    def skip(self, step: int) -> StepOutcome:
        """Clears the gradients without an update."""
        with self._ctx.clock.section("dp"):
            self._buckets.wait()
        self._buckets.clear()
        lr = learning_rate(self._ctx.config.optim, step, self._ctx.config.train.num_steps)
        return StepOutcome(grad_norm=nan, lr=lr, is_skipped=True)

    @property
    def loss_scale(self) -> float:
        """Factor of the loss before its backward."""
        return 1.0 if self._scale is None else self._scale.value

    def state(self) -> Iterator[GlobalFragment]:
        """Master weights and moments, and the weights that are not trained, from the first replica."""
        if self._ctx.groups.dp.rank == 0:
            yield from self._replica_state()
            yield from owned(frozen_weights(self._params), self._ctx.groups.tp.rank)

    def _replica_state(self) -> Iterator[GlobalFragment]:
        """This replica's, without copies that another of its ranks owns."""
        for param, master in self._masters.items():
            where = slice_of(param)
            if not where.is_owned_by(self._ctx.groups.tp.rank):
                continue
            shapes = state_shapes(self._ctx.config, where, master.shape)
            yield from whole_state(where, state_tensors(self._optimizer, master, shapes))
        if self._ctx.groups.model.rank == 0:
            yield scalar_fragment(STEP, self._num_updates)
            if self._scale is not None:
                yield scalar_fragment(LOSS_SCALE, self._scale.value)
                yield scalar_fragment(NUM_GOOD_STEPS, self._scale.num_good_steps)

    def load(self, read: FragmentReader) -> None:
        """Restores what `state` returned, under any layout."""
        self._load_replica(read)
        fill_frozen(frozen_weights(self._params), read)

    def _load_replica(self, read: FragmentReader) -> None:
        """Restores what `_replica_state` returned."""
        self._num_updates = int(read(STEP, (), ()))
        if self._scale is not None:
            self._scale.value = float(read(LOSS_SCALE, (), ()))
            self._scale.num_good_steps = int(read(NUM_GOOD_STEPS, (), ()))
        for param, master in self._masters.items():
            shapes = {WEIGHT: master.shape, **state_shapes(self._ctx.config, slice_of(param), master.shape)}
            state = {kind: master.new_zeros(tuple(shape)) for kind, shape in shapes.items()}
            fill(whole_state(slice_of(param), state), read)
            with torch.no_grad():
                master.copy_(state.pop(WEIGHT))
                if master is not param:
                    param.copy_(master)
            assert self._optimizer is not None, "a parameter without an optimizer"
            set_state(self._optimizer, master, state, self._num_updates)

    def _master(self, param: nn.Parameter) -> Tensor:
        if param.dtype == torch.float32 or not self._ctx.config.precision.master_weights:
            return param
        return param.detach().float().clone()

    def _grad_norm(self) -> float:
        """Norm over the whole model, in fp32 or better: each global element counts once."""
        tp_rank = self._ctx.groups.tp.rank
        owned = [param for param in self._masters if slice_of(param).is_owned_by(tp_rank)]
        squares = torch.zeros((), dtype=torch.float64, device=self._ctx.device)
        if owned:
            squares += squared_norm([self._buckets.view(param) for param in owned])
        if self._ctx.groups.model.size > 1:
            with self._ctx.clock.section("model"):
                dist.all_reduce(squares, group=self._ctx.groups.model.handle)
        return float(squares.sqrt())

    def _step_optimizer(self, lr: float, factor: float) -> None:
        """``factor`` clips the gradient and removes the loss scale from it."""
        if self._optimizer is None:
            return
        for param, master in self._masters.items():
            view = self._buckets.view(param)
            if factor != 1:
                view.mul_(factor)
            master.grad = view.to(master.dtype)
        set_learning_rate(self._optimizer.param_groups, lr)
        self._optimizer.step()
        for param, master in self._masters.items():
            if master.dtype != self._buckets.dtype:
                master.grad = None  # a copy in another format: the next backward must not add to it
            if master is not param:
                master.grad = None
                with torch.no_grad():
                    param.copy_(master)
