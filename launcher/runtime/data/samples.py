"""The data as numbered samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.base.errors import ConfigError
from launcher.contract.config import LaunchConfig
from launcher.contract.data_files import num_training_part, num_windows, sample_faults
from launcher.contract.plan import BatchPlan
from launcher.runtime.data.own_data import Pick
from launcher.runtime.data.reader import Reader
from launcher.runtime.data.tokens import open_tokens

_NOTHING = torch.empty(0, dtype=torch.int64)


class Samples(Protocol):
    """Numbered samples."""

    def __len__(self) -> int:
        """Number of samples."""

    def read(self, picks: Sequence[Pick], *, inputs: bool, targets: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some samples, stacked; each empty where it is not wanted."""


@dataclass(frozen=True)
class Part:
    """Some samples of a user's own dataset, numbered from 0."""

    reader: Reader
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, picks: Sequence[Pick], *, inputs: bool, targets: bool) -> tuple[Tensor, Tensor]:
        """As `Samples`."""
        own = [(epoch, self.indices[index]) for epoch, index in picks]
        return self.reader.read(own, inputs=inputs, targets=targets)


class NoSamples:
    """Those of a rank whose stages use neither inputs nor targets."""

    def __len__(self) -> int:
        return 1

    def read(self, picks: Sequence[Pick], *, inputs: bool, targets: bool) -> tuple[Tensor, Tensor]:
        """As `Samples`."""
        return _NOTHING, _NOTHING


class TokenWindows:
    """Non-overlapping windows of a text; the target of each token is the next one."""

    def __init__(self, tokens: NDArray[np.uint8], seq_length: int) -> None:
        self._tokens, self._length = tokens, seq_length

    def __len__(self) -> int:
        return num_windows(len(self._tokens), self._length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._length
        window = torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))
        return window[:-1], window[1:]

    def read(self, picks: Sequence[Pick], *, inputs: bool, targets: bool) -> tuple[Tensor, Tensor]:
        """As `Samples`."""
        first, second = zip(*(self[index] for _, index in picks), strict=True)
        return torch.stack(first) if inputs else _NOTHING, torch.stack(second) if targets else _NOTHING


def item_of(samples: Samples, index: int) -> int:
    """The number of a sample in the dataset that it is a part of."""
    return samples.indices[index] if isinstance(samples, Part) else index


def open_samples(
    config: LaunchConfig, batch: BatchPlan, cache: Path, reader: Reader | None
) -> tuple[Samples, Samples]:
    """The training samples and the evaluation samples, which are the last of the data.

    ``reader``: of a user's own dataset.

    Raises:
        ConfigError: when there are too few for one step, or for the configured evaluations.
    """
    fraction = config.data.eval_fraction
    training: Samples
    evaluation: Samples
    if reader is not None:
        num_training = num_training_part(len(reader), fraction)
        training, evaluation = (
            Part(reader, range(num_training)),
            Part(reader, range(num_training, len(reader))),
        )
    else:
        assert config.data.source is not None, "data with neither source nor target"
        tokens = open_tokens(config.data.source, cache)
        num_training = num_training_part(len(tokens), fraction)
        training = TokenWindows(tokens[:num_training], config.batch.seq_length)
        evaluation = TokenWindows(tokens[num_training:], config.batch.seq_length)
    if faults := list(sample_faults(config, batch, len(training), len(evaluation))):
        raise ConfigError(faults)
    return training, evaluation
