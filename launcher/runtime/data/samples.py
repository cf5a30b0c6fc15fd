"""The data as numbered samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from launcher.base.errors import ConfigError
from launcher.contract.config import LaunchConfig
from launcher.contract.data.samples import (
    num_training_part,
    num_windows,
    sample_faults,
    token_faults,
    training_tokens,
)
from launcher.contract.plan import BatchPlan
from launcher.runtime.data.own_data import Pick
from launcher.runtime.data.reader import Reader
from launcher.runtime.data.tokens import Tokens, open_tokens

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
    """Non-overlapping windows of some tokens; the target of each token is the next one."""

    def __init__(self, tokens: Tokens, seq_length: int, part: range | None = None) -> None:
        """``part``: of the tokens; None: all of them."""
        self._tokens, self._length = tokens, seq_length
        self._part = range(len(tokens)) if part is None else part

    def __len__(self) -> int:
        return num_windows(len(self._part), self._length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self._part.start + index * self._length
        window = torch.from_numpy(self._tokens.read(start, self._length + 1))
        return window[:-1], window[1:]

    def read(self, picks: Sequence[Pick], *, inputs: bool, targets: bool) -> tuple[Tensor, Tensor]:
        """As `Samples`."""
        first, second = zip(*(self[index] for _, index in picks), strict=True)
        return torch.stack(first) if inputs else _NOTHING, torch.stack(second) if targets else _NOTHING


class Joined:
    """The samples of several sources, numbered one source after the other."""

    def __init__(self, sources: Sequence[TokenWindows]) -> None:
        self._sources = sources
        self._ends = [*accumulate(map(len, sources))]

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def sizes(self) -> list[int]:
        """Samples of each source."""
        return [*map(len, self._sources)]

    def read(self, picks: Sequence[Pick], *, inputs: bool, targets: bool) -> tuple[Tensor, Tensor]:
        """As `Samples`."""
        first, second = zip(*(self._at(index) for _, index in picks), strict=True)
        return torch.stack(first) if inputs else _NOTHING, torch.stack(second) if targets else _NOTHING

    def _at(self, index: int) -> tuple[Tensor, Tensor]:
        source = bisect_right(self._ends, index)
        return self._sources[source][index - (self._ends[source - 1] if source else 0)]


def item_of(samples: Samples, index: int) -> int:
    """The number of a sample in the dataset that it is a part of."""
    return samples.indices[index] if isinstance(samples, Part) else index


def open_samples(config: LaunchConfig, batch: BatchPlan, reader: Reader | None) -> tuple[Samples, Samples]:
    """The training samples and the evaluation samples: the last of the data, or a source of their own.

    ``reader``: of a user's own dataset.

    Raises:
        ConfigError: when there are too few for one step, or for the configured evaluations.
    """
    if reader is None:
        return _open_sources(config, batch)
    num_training = num_training_part(len(reader), config.data.eval_fraction)
    training, evaluation = Part(reader, range(num_training)), Part(reader, range(num_training, len(reader)))
    if faults := [*sample_faults(config, batch, len(training), len(evaluation))]:
        raise ConfigError(faults)
    return training, evaluation


def _open_sources(config: LaunchConfig, batch: BatchPlan) -> tuple[Samples, Samples]:
    data, seq_length = config.data, config.batch.seq_length
    opened = {setting: open_tokens(data, setting, config.run.root) for setting in data.all_sources}
    if faults := [*token_faults(config, batch, [*map(len, opened.values())])]:
        raise ConfigError(faults)
    sources = [opened[setting] for setting in data.sources]
    ends = [training_tokens(data, len(tokens)) for tokens in sources]
    pairs = [*zip(sources, ends, strict=True)]
    training = [TokenWindows(tokens, seq_length, range(end)) for tokens, end in pairs]
    evaluation = [TokenWindows(tokens, seq_length, range(end, len(tokens))) for tokens, end in pairs]
    if data.eval_source is not None:
        evaluation = [TokenWindows(opened["data.eval_source"], seq_length)]
    return _joined(training), _joined(evaluation)


def _joined(sources: Sequence[TokenWindows]) -> Samples:
    return sources[0] if len(sources) == 1 else Joined(sources)
