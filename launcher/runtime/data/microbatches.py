"""Microbatches for this rank's replica, in an order that does not depend on the layout.

Step t takes positions t * G .. (t + 1) * G of the sample order (G = global_size). Slot s of the step
belongs to microbatch i of replica d as its sample j where  s = (i * dp + d) * micro_size + j:

    G = 8, dp = 2, micro_size = 2, 2 microbatches       slot    0 1 2 3 4 5 6 7
                                                        replica 0 0 1 1 0 0 1 1
                                                        micro   0 0 0 0 1 1 1 1
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from launcher.runtime.api import IGNORE_INDEX, RankContext
from launcher.runtime.data.prefetch import Prefetcher
from launcher.runtime.data.samples import SampleOrder, Samples, item_of, open_samples
from launcher.runtime.data.token_ids import check_ids
from launcher.runtime.process.environment import user_cache


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
        """Opens the data.

        Raises:
            ConfigError: when it is missing, or too short for one step or for the evaluations.
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
        cache = Path(config.data.cache_dir).expanduser() if config.data.cache_dir else user_cache()
        self._training, self._evaluation = open_samples(config, self._batch.global_size, cache)
        self._order = SampleOrder(len(self._training), config.seed)
        self._running: Prefetcher[list[Microbatch]] | None = None

    def steps(self, first_step: int) -> Iterator[list[Microbatch]]:
        """The microbatches of ``first_step`` and of every step after it, without end."""
        self.close()
        if self._num_ahead == 0:
            return self._make_steps(first_step)
        self._running = Prefetcher(self._make_steps(first_step), self._num_ahead)
        return self._running

    def evaluation(self) -> list[list[Microbatch]]:
        """The same global batches for every evaluation: the first ones of the evaluation part."""
        return [self._microbatches(self._evaluation, lambda p: p, n) for n in range(self._num_eval_batches)]

    def close(self) -> None:
        """Ends the background thread."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _make_steps(self, first_step: int) -> Generator[list[Microbatch], None, None]:
        for step in count(first_step):
            yield self._microbatches(self._training, self._order.sample, step)

    def _microbatches(self, samples: Samples, sample_at: Callable[[int], int], step: int) -> list[Microbatch]:
        """This replica's part of one global batch."""
        batch = self._batch
        microbatches = []
        for index in range(batch.num_microbatches):
            first = (index * self._dp + self._dp_rank) * batch.micro_size
            slots = range(first, first + batch.micro_size)
            indices = [sample_at(step * batch.global_size + slot) for slot in slots]
            inputs, targets = self._read(samples, indices)
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

    def _read(self, samples: Samples, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some samples; empty where this rank's stages do not use them.

        Raises:
            ConfigError: when one holds an id outside of the vocabulary.
        """
        nothing = torch.empty(0, dtype=torch.int64)
        if not (self._is_first or self._is_last):
            return nothing, nothing
        inputs, targets = zip(*(samples[index] for index in indices), strict=True)
        used = (
            torch.stack(inputs) if self._is_first else nothing,
            torch.stack(targets) if self._is_last else nothing,
        )
        check_ids(self._plan, *used, [item_of(samples, index) for index in indices])
        return used


def _num_targets(targets: Tensor) -> int:
    """Only class indices can be ignored: a target that is a real number always counts."""
    return targets.numel() if targets.is_floating_point() else int((targets != IGNORE_INDEX).sum())
