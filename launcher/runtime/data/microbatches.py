"""Microbatches for this rank's replica, in an order that does not depend on the layout.

Step t takes positions t * G .. (t + 1) * G of the sample order (G = global_size). Slot s of the step
belongs to microbatch i of replica d as its sample j where  s = (i * dp + d) * micro_size + j:

    G = 8, dp = 2, micro_size = 2, 2 microbatches       slot    0 1 2 3 4 5 6 7
                                                        replica 0 0 1 1 0 0 1 1
                                                        micro   0 0 0 0 1 1 1 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from launcher.contract.data.blend import Blend
from launcher.contract.heartbeat import LOADING
from launcher.runtime.api import IGNORE_INDEX, RankContext
from launcher.runtime.data.agreement import compared_items
from launcher.runtime.data.order import BlendOrder, SampleOrder
from launcher.runtime.data.own_data import Pick
from launcher.runtime.data.prefetch import Prefetcher
from launcher.runtime.data.reader import Reader
from launcher.runtime.data.samples import Joined, NoSamples, Samples, item_of, open_samples
from launcher.runtime.data.token_ids import check_ids


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Samples that go through the model together."""

    inputs: Tensor
    """Tokens int64 [micro, seq], or [micro, ...] of a user's own data; empty away from the first stage."""
    targets: Tensor
    """Next tokens int64 [micro, seq], or [micro, ...]; `IGNORE_INDEX` ones add nothing to the loss. Empty
    away from the last stage."""
    samples: Tensor
    """int64 [micro]: each sample's slot in the step's global batch."""
    num_targets: int
    """Targets that are not `IGNORE_INDEX`, counted before the tensors leave the host."""
    step: int


class Loader:
    """Loads every step's microbatches for one replica."""

    def __init__(self, ctx: RankContext) -> None:
        """Opens the data. Waits for the other ranks where they read a user's own dataset.

        Raises:
            ConfigError: when it is missing, cannot be read, is too short for one step or for the evaluations,
                or is not the same on every rank.
        """
        coordinates = ctx.plan.coordinates
        assert coordinates is not None, "a rank that does not train has no data"
        config, self._plan, self._batch = ctx.config, ctx.plan.plan, ctx.plan.plan.batch
        self._device = ctx.device
        self._dp, self._dp_rank = ctx.plan.plan.mesh.dp, coordinates.dp
        self._is_first = any(stage.stage == 0 for stage in ctx.plan.stages)
        self._is_last = any(stage.stage == len(ctx.plan.plan.stages) - 1 for stage in ctx.plan.stages)
        self._num_ahead = config.data.prefetch_batches
        self._num_eval_batches = config.train.eval_batches
        weights = config.data.weights
        self._blend = Blend(weights) if weights else None
        self._running: Prefetcher[list[Microbatch]] | None = None
        self._reader: Reader | None = None
        self.first_digests: dict[int, str] = {}
        """By index, of the items of a user's own dataset that all ranks have compared."""
        with ctx.clock.doing(LOADING):
            self._training, self._evaluation = self._open(ctx)
        self._ctx = ctx
        self.batch_of: Callable[[int], int] = lambda step: step
        """Which batch of the data each step takes; another where some were passed over."""

    def _open(self, ctx: RankContext) -> tuple[Samples, Samples]:
        if not (self._is_first or self._is_last):
            return NoSamples(), NoSamples()
        data = ctx.config.data
        if data.target is not None:
            self._reader = Reader(ctx.config)
            self.first_digests = compared_items(ctx.plan, self._reader, ctx.clock)
        return open_samples(ctx.config, self._batch, self._reader)

    @property
    def num_samples(self) -> int:
        """How many samples are trained on."""
        return len(self._training)

    def digests(self, indices: Sequence[int]) -> list[str]:
        """A hash of each of some items of a user's own dataset, read anew."""
        assert self._reader is not None, "only a user's own dataset is compared by its items"
        return self._reader.fingerprints(indices)

    def steps(self, first_step: int) -> Iterator[list[Microbatch]]:
        """The microbatches of ``first_step`` and of every step after it, without end, in the order of
        `RankContext.sample_order`."""
        self._end_thread()
        order = self._order()
        batch_of = self.batch_of
        steps = (
            self._microbatches(self._training, order.pick, step, batch_of(step)) for step in count(first_step)
        )
        if self._num_ahead == 0:
            return steps
        self._running = Prefetcher(steps, self._num_ahead)
        return self._running

    def _order(self) -> SampleOrder | BlendOrder:
        """Which sample of the training stands where."""
        seed, version, training = self._ctx.config.seed, self._ctx.sample_order, self._training
        if isinstance(training, Joined) and self._blend is not None:
            return BlendOrder(training.sizes, self._blend, seed, version)
        return SampleOrder(len(training), seed, version)

    def evaluation(self) -> list[list[Microbatch]]:
        """The same global batches for every evaluation: the first ones of the evaluation part."""
        steps = range(self._num_eval_batches)
        return [self._microbatches(self._evaluation, self._evaluated, step, step) for step in steps]

    def _evaluated(self, position: int) -> Pick:
        """The sample at a position of an evaluation: the first ones, of a blend of each source."""
        if not isinstance(self._evaluation, Joined) or self._blend is None:
            return 0, position
        source, number = self._blend.at(position)
        return 0, sum(self._evaluation.sizes[:source]) + number

    def close(self) -> None:
        """Ends the background thread, and the process that reads a user's own dataset."""
        self._end_thread()
        if self._reader is not None:
            self._reader.close()

    def _end_thread(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def _microbatches(
        self, samples: Samples, pick: Callable[[int], Pick], step: int, number: int
    ) -> list[Microbatch]:
        """This replica's part of the global batch of a number, for a step."""
        batch = self._batch
        microbatches = []
        for index in range(batch.num_microbatches):
            first = (index * self._dp + self._dp_rank) * batch.micro_size
            slots = range(first, first + batch.micro_size)
            picks = [pick(number * batch.global_size + slot) for slot in slots]
            inputs, targets = self._read(samples, picks)
            microbatches.append(
                Microbatch(
                    inputs=inputs.to(self._device),
                    targets=targets.to(self._device),
                    samples=torch.tensor(slots, dtype=torch.int64).to(self._device),
                    num_targets=_num_targets(targets),
                    step=step,
                )
            )
        return microbatches

    def _read(self, samples: Samples, picks: Sequence[Pick]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some samples, each empty where this rank's stages do not use it.

        Raises:
            ConfigError: when one holds an id outside of the vocabulary.
        """
        inputs, targets = samples.read(picks, inputs=self._is_first, targets=self._is_last)
        check_ids(self._plan, inputs, targets, [item_of(samples, index) for _, index in picks])
        return inputs, targets


def _num_targets(targets: Tensor) -> int:
    """Only class indices can be ignored: a target that is a real number always counts."""
    return targets.numel() if targets.is_floating_point() else int((targets != IGNORE_INDEX).sum())
