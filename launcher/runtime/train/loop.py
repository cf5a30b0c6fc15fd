"""The training loop. It has no branch on the strategy: that is in the `Update` and the action list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.registry import resolve
from launcher.contract.actions import from_text
from launcher.contract.heartbeat import BUILDING, PEERS
from launcher.contract.job import RESUME_NOTE
from launcher.contract.model.checkpoint import first_step
from launcher.contract.records import INPUT, SINGLE_RANK, EvalRecord, StepRecord
from launcher.runtime.alarms.losses import Alarm, LossAlarms
from launcher.runtime.alarms.watch import Watch
from launcher.runtime.api import (
    DTYPES,
    FragmentReader,
    GlobalFragment,
    RankContext,
    StepOutcome,
    Update,
)
from launcher.runtime.checkpoint.initial import initial_state, keep_initial_config
from launcher.runtime.checkpoint.saving import Saver, restore
from launcher.runtime.data.inputs import check_inputs
from launcher.runtime.data.microbatches import Loader, Microbatch
from launcher.runtime.measure.clock import rank_header
from launcher.runtime.measure.memory import MemoryGauge, limit_memory
from launcher.runtime.measure.message_latency import message_latency_ns
from launcher.runtime.measure.records import RecordWriter
from launcher.runtime.measure.windows import StepWindows
from launcher.runtime.model.build import build_chunks
from launcher.runtime.process.log import log, rank_summary
from launcher.runtime.process.stop import StopRequest
from launcher.runtime.train.optimizer import NotFiniteError
from launcher.runtime.train.pipeline_executor import PipelineExecutor, PipelinePart
from launcher.runtime.train.reductions import PendingSum


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """The result of one step on this rank."""

    outcome: StepOutcome
    loss: float | None
    """Mean over the targets of the global batch; None away from the last stage."""
    num_receives: int
    alarm: Alarm | None = None
    """What was wrong with it, where the run goes on."""


class Trainer:
    """One rank's model, update and executor."""

    def __init__(self, ctx: RankContext) -> None:
        self.ctx = ctx
        self.memory = MemoryGauge(ctx.device, tracks_saved=ctx.config.report.claims)
        self.update: Update = resolve(ctx.plan.plan.update)(ctx)
        with ctx.clock.doing(BUILDING):
            chunks = build_chunks(ctx)
        self._modules = nn.ModuleList(self.update.prepare(chunks))
        self.part = pipeline_part(ctx, list(self._modules))
        self.executor = PipelineExecutor(self.part, ctx.transport, ctx.clock)
        self.memory.model_built()
        self._has_loss = self.part.shape.num_stages - 1 in self.part.modules
        self.losses = LossAlarms(ctx)

    def step(self, step: int, microbatches: Sequence[Microbatch]) -> StepDone:
        """Forwards, backwards and the update of one step, which is left out where an alarm has it skipped.

        Raises:
            JobError: when an alarm ends the run.
        """
        self.update.begin(step)
        over_replicas = self.ctx.replicas is None or not self.ctx.replicas.is_asynchronous
        num_targets = self._num_targets(microbatches, over_replicas=over_replicas)
        with self.memory.tracking(self.part.modules.values(), self.part.deferral):
            result = self.executor.train(
                microbatches, self.update, lambda: self.update.loss_scale / num_targets.value().clamp(min=1)
            )
        with self.ctx.clock.section(SINGLE_RANK):
            self.memory.sample(self)
        loss_sum = self._loss_sum(result.loss_sum, over_replicas=over_replicas)
        outcome, loss, alarm = self._update(step, lambda: _mean(loss_sum, num_targets))
        return StepDone(
            outcome=outcome,
            loss=loss if self._has_loss else None,
            num_receives=result.num_receives,
            alarm=alarm,
        )

    def _update(
        self, step: int, mean_loss: Callable[[], float | None]
    ) -> tuple[StepOutcome, float | None, Alarm | None]:
        """The update, unless its batch is skipped; the loss, as far as it is known here; and the alarm.

        Only where a batch may be skipped, or the training go back, is the loss waited for before the update.
        """
        losses, alarm = self.losses, None
        if losses.decides_first:
            loss = losses.agree(mean_loss())
            alarm = losses.judge(step, loss)
        is_skipped = alarm is not None and alarm.action == "skip"
        try:
            outcome = self.update.skip(step) if is_skipped else self.update.apply(step)
        except NotFiniteError as error:  # of an update that ranks of another role make
            losses.tell_of_gradient(step, error)
            raise
        if not losses.decides_first:
            loss = mean_loss()
        alarm = alarm or losses.judge(step, loss, outcome)
        if alarm is not None:
            losses.act(step, alarm)
        if not outcome.is_skipped:
            losses.took(loss)
        return outcome, loss, alarm

    def state(self) -> Iterator[GlobalFragment]:
        """The state of the training: that of the update, and the losses that later ones are compared with."""
        yield from self.update.state()
        yield from self.losses.state()

    def load(self, read: FragmentReader) -> None:
        """Restores what `state` returned, under any layout."""
        self.update.load(read)
        self.losses.load(read)

    def evaluate(self, batches: Sequence[Sequence[Microbatch]]) -> tuple[float | None, int]:
        """Mean loss and number of targets over some global batches; the loss is None away from the
        last stage."""
        if self.ctx.replicas is not None:
            self.ctx.replicas.synchronize()
        self._modules.train(False)
        sums = [self.executor.evaluate(microbatches) for microbatches in batches]
        self._modules.train()
        num_targets = self._num_targets([m for batch in batches for m in batch], over_replicas=True)
        loss_sum = torch.stack([s for s in sums if s is not None]).sum() if self._has_loss else None
        loss = _mean(self._loss_sum(loss_sum, over_replicas=True), num_targets)
        return loss, int(num_targets.value())

    def _num_targets(self, microbatches: Sequence[Microbatch], *, over_replicas: bool) -> PendingSum:
        """Targets of some microbatches, of every replica or of this one alone; 1 away from the last stage,
        where no loss is scaled."""
        count = sum(batch.num_targets for batch in microbatches) if self._has_loss else 1
        value = torch.tensor(count, dtype=torch.float64, device=self.ctx.device)
        return PendingSum(self.ctx, value, over_replicas=over_replicas and self._has_loss)

    def _loss_sum(self, loss_sum: Tensor | None, *, over_replicas: bool) -> PendingSum | None:
        if loss_sum is None:
            return None
        return PendingSum(self.ctx, loss_sum.detach().double(), over_replicas=over_replicas)


def _mean(loss_sum: PendingSum | None, num_targets: PendingSum) -> float | None:
    return float(loss_sum.value()) / max(1.0, float(num_targets.value())) if loss_sum else None


def pipeline_part(ctx: RankContext, modules: Sequence[nn.Module]) -> PipelinePart:
    """The rank's part of the pipeline, from its plan."""
    plan = ctx.plan.plan
    parallel, batch = plan.config.parallel, plan.batch

    def local(shape: tuple[int, ...]) -> tuple[int, ...]:
        if parallel.sequence_parallel:
            shape = (shape[0] // parallel.tp, *shape[1:])
        return (batch.micro_size, *shape)

    return PipelinePart(
        shape=plan.pipeline,
        modules={stage.stage: module for stage, module in zip(ctx.plan.stages, modules, strict=True)},
        actions=from_text(ctx.plan.actions),
        input_shapes={stage.stage: local(stage.input_shape) for stage in plan.stages[1:]},
        deferral=ctx.split_backward,
        dtype=DTYPES[plan.config.precision.compute],
        device=ctx.device,
    )


def train(ctx: RankContext, run_dir: Path, *, resume: bool) -> None:
    """Trains to the last step, with records, evaluations and checkpoints on the way.

    On a stop request to any rank all save after their current step, and return.
    """
    config = ctx.config
    loader = Loader(ctx)  # wrong data are told before a large model is built
    check_inputs(ctx, loader, run_dir, resume=resume)
    trainer = Trainer(ctx)
    root, note = run_dir / "checkpoints", run_dir / RESUME_NOTE
    ctx.stop, saver = _stop_request(ctx), Saver(ctx, trainer, root)
    if config.device.limits_memory:
        limit_memory(ctx.device, config.device.memory_bytes, trainer)
    if ctx.replicas is None:
        saver.check_writable()
    first = restore(ctx, trainer, root, note) if resume else _load_initial(trainer)
    if not resume and ctx.plan.rank == 0:
        keep_initial_config(config.train, run_dir)
    latency_ns = message_latency_ns(ctx, trainer.part.input_shapes.values(), trainer.part.dtype)
    header = rank_header(ctx.plan, ctx.device, latency_ns)
    log(rank_summary(header, ctx.plan, trainer.part.modules.values()))
    watch = Watch(ctx, trainer.losses, run_dir)

    def begin(first: int) -> tuple[RecordWriter, StepWindows, Iterator[list[Microbatch]]]:
        """The records and the data from a step on."""
        writer = RecordWriter(run_dir, header)
        windows = StepWindows(ctx, writer, first, latency_ns)
        loader.batch_of = watch.rewinds.batch_of
        steps = loader.steps(first)
        ctx.clock.start()
        return writer, windows, steps

    (writer, windows, steps), num_done = begin(first), first
    while num_done < config.train.num_steps:
        step = num_done
        ctx.clock.begin_step(step)
        with ctx.clock.section(INPUT):
            microbatches = next(steps)
        done, num_done = trainer.step(step, microbatches), step + 1
        if done.alarm is not None and done.alarm.action == "rewind":
            windows.write(_record(ctx, step, done, ctx.clock.lap()))
            first = num_done = watch.rewind(step, done.alarm, saver, trainer)
            writer.close()
            writer, windows, steps = begin(first)
            continue
        with ctx.clock.section(SINGLE_RANK, sealed=True):
            evaluation = _evaluate_and_save(trainer, loader, saver, num_done)
        times = ctx.clock.lap()
        with ctx.clock.section(SINGLE_RANK):
            windows.write(_record(ctx, step, done, times))
            if evaluation is not None:
                writer.write(evaluation)
        saver.check()
        if step > first:  # the first one also warms up
            saver.measure(times["duration_ns"] / 1e9)
        watch.after(step, times)
        if num_done < config.train.num_steps and _must_stop(ctx, times["duration_ns"] / 1e9):
            _save_and_stop(trainer, saver, run_dir, num_done)
            break
    else:
        if (memory := trainer.memory.record(config.train.num_steps)) is not None:
            writer.write(memory)
    saver.wait()
    watch.close()
    log(f"ends after step {num_done} of {config.train.num_steps}")
    loader.close()
    if ctx.replicas is not None:
        ctx.replicas.leave(num_done)
    trainer.update.close()
    writer.close()


def _stop_request(ctx: RankContext) -> StopRequest | None:
    """Listens for signals; not in a run without checkpoints, which they end at once."""
    if not ctx.config.train.checkpoint_interval:
        return None
    stop = StopRequest(ctx.device)
    stop.arm()
    return stop


def _must_stop(ctx: RankContext, step_s: float) -> bool:
    """Whether all ranks stop after the step that took ``step_s``."""
    if ctx.stop is None:
        return False
    if ctx.replicas is not None:
        return ctx.stop.agreed > 0
    with ctx.clock.doing(PEERS):
        return ctx.stop.agree(step_s)


def _save_and_stop(trainer: Trainer, saver: Saver, run_dir: Path, num_done: int) -> None:
    """The checkpoint of a run that stops on request, unless ranks of another role save it."""
    ctx = trainer.ctx
    assert ctx.stop is not None, "a run without stop requests"
    if ctx.replicas is not None:
        return
    if not _is_due(num_done, ctx.config.train.checkpoint_interval, ctx.config.train.num_steps):  # else saved
        saver.save(num_done)
    saver.wait()
    if ctx.plan.rank == 0:
        ctx.stop.write_note(run_dir, num_done)


def _load_initial(trainer: Trainer) -> int:
    """Loads what the training begins with, where it is set to begin with something; returns the steps that
    are done by then."""
    num_done = first_step(trainer.ctx.config.train)
    if (read := initial_state(trainer.ctx)) is not None:
        (trainer.load if num_done else trainer.update.load)(read)
    return num_done


def _evaluate_and_save(trainer: Trainer, loader: Loader, saver: Saver, num_done: int) -> EvalRecord | None:
    """Evaluation and checkpoint, where they are due after ``num_done`` steps."""
    settings = trainer.ctx.config.train
    evaluation = None
    if settings.eval_batches and _is_due(num_done, settings.eval_interval, settings.num_steps):
        loss, num_targets = trainer.evaluate(loader.evaluation())
        if loss is not None:
            evaluation = EvalRecord(step=num_done, loss=loss, num_tokens=num_targets)
    interval = settings.checkpoint_interval
    if interval and trainer.ctx.replicas is None and _is_due(num_done, interval, settings.num_steps):
        saver.save(num_done)
    return evaluation


def _is_due(num_done: int, interval: int, last: int) -> bool:
    return (interval > 0 and num_done % interval == 0) or num_done == last


def _record(ctx: RankContext, step: int, done: StepDone, times: dict[str, Any]) -> StepRecord:
    batch = ctx.plan.plan.batch
    return StepRecord(
        step=step,
        num_receives=done.num_receives,
        num_samples=batch.global_size,
        num_tokens=batch.num_tokens,
        loss=done.loss if done.loss is None or isfinite(done.loss) else None,
        grad_norm=None if done.outcome.is_skipped else done.outcome.grad_norm,
        lr=done.outcome.lr,
        is_skipped=done.outcome.is_skipped,
        disagreement=done.outcome.disagreement,
        **times,
    )
