"""Datasets of a user's own, and the configurations that train on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launcher.contract.config import LaunchConfig
from launcher.runtime.data.microbatches import Loader
from tests.helpers.contexts import make_config, make_context
from tests.helpers.plans import staged_plan

SEQ = 8
SHIFT, SHORTER = "SHIFT_OF_ITEMS", "SHORTER_BY"
"""Environment variables that make the dataset of a rank another."""


class Numbers:
    """Sample n is the number n, plus what the environment of this rank says."""

    def __init__(self, length: int = 64) -> None:
        self._length = length - int(os.environ.get(SHORTER, 0))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= self._length:
            raise IndexError("off the end")
        return torch.full((3,), float(index)), index + int(os.environ.get(SHIFT, 0)) * (index >= 32)


def data_of(dataset: Callable[..., Any], **settings: Any) -> dict[str, Any]:
    """Settings of a dataset that a test defines."""
    target = f"{dataset.__module__}:{dataset.__name__}"
    return {"target": target, "source": None, "prefetch_batches": 2, "options": {}} | settings


def config_of(
    dataset: Callable[..., Any], family: str = "gpt", seed: int = 7, **sections: Any
) -> LaunchConfig:
    """A tiny job on a dataset that a test defines: rows of `SEQ` numbers, four a step."""
    sections["data"] = data_of(dataset, **sections.get("data", {}))
    batch = {"micro_size": 4, "seq_length": SEQ}
    model = {"family": family, "vocab_size": 256}
    return replace(make_config(model=model, batch=batch, **sections), seed=seed)


def loader_of(dataset: Callable[..., Any], family: str = "gpt", seed: int = 7, **sections: Any) -> Loader:
    """The data of one rank."""
    return Loader(make_context(staged_plan(config_of(dataset, family, seed, **sections))))
