"""The update by DeepSpeed's ZeRO, driven by the launcher's loop and schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.contract.records import REPLICATED
from launcher.runtime.api import (
    FragmentReader,
    GlobalFragment,
    RankContext,
    Root,
    StepOutcome,
    Update,
    slice_of,
)
from launcher.runtime.checkpoint.fragments import (
    LOSS_SCALE,
    NUM_GOOD_STEPS,
    STEP,
    fill_frozen,
    scalar_fragment,
)
from launcher.runtime.model.deferred_weight_gradients import DeferredWeightGradient
from launcher.runtime.train.optimizer import adamw, learning_rate
from launcher.runtime.train.reductions import sum_gradients_of_copies
from launcher_plugins.parallel.zero.plan import CONFIG_NAME
from launcher_plugins.parallel.zero.runtime.engine import partitioner, placeholders, start_engine
from launcher_plugins.parallel.zero.runtime.state import (
    OwnedPart,
    frozen_parts,
    load,
    num_good_steps,
    owned_parts,
    refresh_weights,
    set_num_good_steps,
)


def apply(ctx: RankContext) -> None:
    """At stage 3 the weights are partitioned while the model is built; DeepSpeed exchanges the gradients
    itself."""
    if ctx.config.parallel.zero_stage == 3:
        ctx.partition_weights = partitioner(ctx, _config(ctx))


def update(ctx: RankContext) -> Update:
    """The update of this rank: beside any schedule at stage 1, around a whole replica from stage 2 on."""
    return Zero1Update(ctx) if ctx.config.parallel.zero_stage == 1 else ZeroUpdate(ctx)


def _config(ctx: RankContext) -> dict[str, Any]:
    return dict(ctx.plan.plan.documents[CONFIG_NAME])


class _DeepSpeedUpdate(Update):
    """What every stage has in common.

    DeepSpeed averages gradients over the replicas, while the launcher's loss is scaled so that their sum is
    the gradient: hence the factor dp in the loss scale.
    """

    _engine: Any
    _params: list[nn.Parameter]
    """Those that are trained."""
    _model_params: list[nn.Parameter]
    """All."""
    _placeholders: list[nn.Parameter]

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._num_updates = 0

    def state(self) -> Iterator[GlobalFragment]:
        """This rank's part of the master weights and moments, without copies that another rank owns."""
        tp_rank = self._ctx.groups.tp.rank
        parts = [part for part in self._parts() if part.where.is_owned_by(tp_rank)]
        for part in parts:
            yield from part.fragments(self._engine.optimizer)
        yield from frozen_parts(self._model_params, is_first=self._ctx.groups.dp.rank == 0)
        if self._ctx.groups.model.rank == 0 and self._ctx.groups.dp.rank == 0:
            yield scalar_fragment(STEP, self._num_updates)
            if (scaler := self._scaler) is not None:
                yield scalar_fragment(LOSS_SCALE, scaler.cur_scale)
                yield scalar_fragment(NUM_GOOD_STEPS, num_good_steps(scaler))

    def load(self, read: FragmentReader) -> None:
        """Restores what `state` returned, under any layout."""
        self._num_updates = int(read(STEP, (), ()))
        load(self._engine.optimizer, self._parts(), self._num_updates, read)
        refresh_weights(self._engine.optimizer, self._params)
        fill_frozen(frozen_parts(self._model_params, is_first=True), read)
        if (scaler := self._scaler) is not None:
            scaler.cur_scale = float(read(LOSS_SCALE, (), ()))
            set_num_good_steps(scaler, int(read(NUM_GOOD_STEPS, (), ())))

    def close(self) -> None:
        """Removes DeepSpeed's hooks from the model."""
        self._engine.destroy()

    def _start(self, model: nn.Module) -> None:
        ctx = self._ctx
        self._model_params = list(model.parameters())
        self._params = [param for param in self._model_params if param.requires_grad]
        dims = [len(slice_of(param).shape) for param in self._params]
        trained = list(zip(self._params, dims, strict=True))
        self._placeholders = placeholders(ctx, model, dims) if ctx.groups.pp.size > 1 else []
        trained += [(param, param.dim()) for param in self._placeholders]
        optimizer = adamw(trained, ctx.config, torch.optim.AdamW)  # DeepSpeed knows torch's own alone
        assert optimizer is not None, "the plan rejects a model without anything to train"
        self._engine = start_engine(self._ctx, model, optimizer, _config(self._ctx))

    def _step(self, step: int) -> StepOutcome:
        """Norm, clipping and the update of this rank's part, then the exchange of the new weights."""
        config, engine = self._ctx.config, self._engine
        lr = learning_rate(config.optim, step, config.train.num_steps)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        with self._ctx.clock.section(REPLICATED):
            engine.step()
        if engine.was_step_applied():
            self._num_updates += 1
            return StepOutcome(grad_norm=float(engine.get_global_grad_norm()), lr=lr)
        is_scaled = config.precision.compute == "fp16"
        return StepOutcome(grad_norm=torch.inf, lr=lr, is_skipped=True, is_finite=is_scaled)

    def _parts(self) -> list[OwnedPart]:
        return owned_parts(self._engine.optimizer, self._params)

    @property
    def _scaler(self) -> Any:
        """DeepSpeed's dynamic loss scale of fp16; None in other formats."""
        return self._engine.optimizer.loss_scaler if self._ctx.config.precision.compute == "fp16" else None


class Zero1Update(_DeepSpeedUpdate):
    """Stage 1: DeepSpeed reduces the gradients after the schedule, which may be any."""

    def prepare(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Takes over the chunks' parameters; returns the modules to run."""
        self._start(nn.ModuleList(chunks))
        return chunks

    @property
    def loss_scale(self) -> float:
        """Factor of the loss before its backward."""
        scaler = self._scaler
        return self._ctx.groups.dp.size * (1.0 if scaler is None else float(scaler.cur_scale))

    def backward(self, out: Root | None, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        """Backward of one microbatch."""
        if out is not None:
            torch.autograd.backward(out, grad)

    def backward_weight(self, deferred: Sequence[DeferredWeightGradient], *, chunk: int, last: bool) -> None:
        """The weight gradients that a split backward has deferred, accumulated by autograd."""
        for gradient in deferred:
            torch.autograd.backward(gradient.weight.view_as(gradient.weight), gradient.compute())

    def apply(self, step: int) -> StepOutcome:
        """Sums the gradients, clips, updates the parameters, clears the gradients."""
        for param in self._placeholders:
            torch.autograd.backward(param.view_as(param), torch.zeros_like(param))
        sum_gradients_of_copies(self._ctx, self._params, _accumulated)
        self._engine.set_gradient_accumulation_boundary(True)
        with self._ctx.clock.section(REPLICATED):
            self._engine.allreduce_gradients()
        outcome = self._step(step)
        self._copy_tied_weights()
        return outcome

    def load(self, read: FragmentReader) -> None:
        """Restores what `state` returned, under any layout."""
        super().load(read)
        self._copy_tied_weights()

    def _copy_tied_weights(self) -> None:
        """Copies tied weights from the first to the last stage: the two average over different groups, whose
        sums round in another order, and the copies would diverge."""
        group = self._ctx.groups.tied
        for param in self._params if group.size > 1 else ():
            if slice_of(param).is_tied:
                with self._ctx.clock.section("tied"):
                    dist.broadcast(param.data, src=group.ranks[0], group=group.handle)


def _accumulated(param: Any) -> Tensor:
    """The tensor in which DeepSpeed accumulates a gradient: its fp32 copy, where there is one."""
    found = (getattr(param, name, None) for name in ("_hp_grad", "grad_accum", "grad"))
    return cast(Tensor, next(gradient for gradient in found if gradient is not None))


class ZeroUpdate(_DeepSpeedUpdate):
    """Stages 2 and 3: every backward reduces the gradients to their owners."""

    def prepare(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Takes over the parameters of the one chunk; returns the engine, which runs it."""
        (chunk,) = chunks
        for param in chunk.parameters():
            if slice_of(param).is_summed_over_tp:
                param.register_hook(self._summed_over_tp)  # type: ignore[no-untyped-call]
        self._start(chunk)
        return [self._engine]

    @property
    def loss_scale(self) -> float:
        """The factor dp; DeepSpeed applies that of fp16 itself."""
        return float(self._ctx.groups.dp.size)

    def backward(self, out: Root | None, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        """Backward of one microbatch, whose gradients are reduced to their owners."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(out, scale_wrt_gas=False)

    def backward_weight(self, deferred: Sequence[DeferredWeightGradient], *, chunk: int, last: bool) -> None:
        """No schedule of one stage splits the backward."""
        raise AssertionError("the plan rejects a split backward above stage 1")

    def apply(self, step: int) -> StepOutcome:
        """Clips, updates the parameters, clears the gradients."""
        return self._step(step)

    def _summed_over_tp(self, grad: Tensor) -> Tensor:
        """Sums the gradient of a whole parameter, of which each tensor-parallel rank saw a part of the
        sequence, before it is reduced over the replicas."""
        whole = grad.float()
        with self._ctx.clock.section("tp"):
            dist.all_reduce(whole, group=self._ctx.groups.tp.handle)
        return whole.to(grad.dtype)
