"""A user's own dataset: made, read item by item, and checked.

``data.target: package.module:function`` names a class or a function. Called with ``data.options`` it returns
an object with a length, whose items 0, 1, ... are pairs (input, target): tensors, NumPy arrays or numbers, of
the same shapes and types for every item; whole numbers of 16 and 32 bits become int64, as layers and losses
take them. The same index must give the same item on every rank, as one may read the inputs and another the
targets. What ``random``, ``numpy.random`` and torch draw for an item depends on the run's seed, the epoch and
the index alone, so that random crops and masks are the same in every layout.

The dataset is made and read in a process of its own (`launcher.runtime.data.reader`), without a GPU.
"""

from __future__ import annotations

import hashlib
import random
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import launcher
from launcher.base.errors import ConfigError, Fault
from launcher.base.registry import resolve
from launcher.contract.data.config import DataConfig

Pick = tuple[int, int]
"""Epoch and index of a sample."""
Packed = tuple[torch.dtype, tuple[int, ...], NDArray[np.uint8]]
"""Type, shape and bytes of a tensor."""
_NAMES = ("input", "target")
_WIDENED = (torch.int16, torch.int32, torch.uint16, torch.uint32)
_LAUNCHER = str(Path(launcher.__file__).parent)


class OwnData:
    """The samples of ``data.target``. It sets the global random generators: for a process that only reads."""

    def __init__(self, data: DataConfig, *, seed: int, seq_length: int | None = None) -> None:
        """Makes the dataset. ``seq_length``: of a language model, whose samples are rows of token ids.

        Raises:
            ConfigError: when it cannot be made, or has no length.
        """
        self._target, self._seed, self._seq_length = data.target, seed, seq_length
        self._first: tuple[int, Sequence[str]] | None = None
        """Index and forms of the item that was read first: all others have the same."""
        assert data.target is not None, "data without a target"
        try:
            self._samples = resolve(data.target)(**data.options)
            self._length = len(self._samples)
        except Exception as error:
            rule = f"the dataset could not be made: {reason(error)}"
            raise self._refusal(rule, f"Check data.options={dict(data.options)} and the code.") from error

    def __len__(self) -> int:
        return self._length

    def packed(self, picks: Sequence[Pick], inputs: bool, targets: bool) -> tuple[Packed, Packed]:
        """Inputs and targets of some samples, stacked; each empty where it is not wanted.

        Raises:
            ConfigError: when an item cannot be read, or is not like the others.
        """
        first, second = zip(*[self.item(*pick) for pick in picks], strict=True)
        return _packed(first if inputs else ()), _packed(second if targets else ())

    def item(self, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """Input and target of one sample.

        Raises:
            ConfigError: as `packed`.
        """
        _seed_generators(f"{self._seed}/item/{epoch}/{index}")
        try:
            found = self._samples[index]
        except Exception as error:
            fix = "Correct the dataset, or its files."
            raise self._refusal(f"item {index} raised {reason(error)}", fix) from error
        pair = self._pair(found, index)
        forms = [_form(value) for value in pair]
        self._first = self._first or (index, forms)
        first_index, first = self._first
        for name, form, other in zip(_NAMES, forms, first, strict=True):
            if form != other:
                rule = f"the {name} of item {index} is {form}, that of item {first_index} {other}"
                fix = "Pad or cut all to one shape; integer targets of -100 add nothing to the loss."
                raise self._refusal(rule, fix)
        return pair

    def fingerprints(self, indices: Sequence[int]) -> list[str]:
        """A hash of each of some items of the first epoch.

        Raises:
            ConfigError: as `packed`.
        """
        return [_fingerprint(self.item(0, index)) for index in indices]

    def _pair(self, found: Any, index: int) -> tuple[Tensor, Tensor]:
        if not isinstance(found, tuple | list) or len(found) != len(_NAMES):
            fix = "Return input and target."
            if isinstance(found, Mapping) and len(found) > 1:
                first, *_, last = found
                fix = f"Return two of its values, such as (item[{first!r}], item[{last!r}])."
            raise self._refusal(f"item {index} is {_kind(found)}, not a pair (input, target)", fix)
        inputs, targets = (
            self._tensor(value, f"the {name} of item {index}")
            for name, value in zip(_NAMES, found, strict=True)
        )
        return inputs, targets

    def _tensor(self, given: Any, what: str) -> Tensor:
        """A value in a type that layers and losses take; of a language model as token ids."""
        try:
            value = torch.as_tensor(given).detach()
        except Exception as error:
            fix = "Return a tensor, a NumPy array or a number."
            raise self._refusal(f"{what} is {_kind(given)}", fix) from error
        length = self._seq_length
        if length is None:
            return value.long() if value.dtype in _WIDENED else value
        if value.is_floating_point() or value.shape != (length,):
            rule = f"{what} is {_form(value)}; the model takes batch.seq_length={length} token ids"
            fix, way = f"Return whole numbers of shape [{length}].", {}
            if value.dim() == 1 and not value.is_floating_point():
                way = {"batch.seq_length": len(value)}
                fix = f"{fix[:-1]}, or set batch.seq_length={len(value)}."
            raise self._refusal(rule, fix, way)
        return value.long()

    def _refusal(self, rule: str, fix: str, way: Mapping[str, Any] = MappingProxyType({})) -> ConfigError:
        ways = (dict(way),) if way else ()
        return ConfigError([Fault("data.target", self._target, rule, fix, ways=ways)])


def _packed(samples: Sequence[Tensor]) -> Packed:
    """Samples as one tensor, in a form that is quick to send."""
    stacked = torch.stack(list(samples)) if samples else torch.empty(0, dtype=torch.int64)
    return stacked.dtype, tuple(stacked.shape), stacked.reshape(-1).view(torch.uint8).numpy()


def _fingerprint(pair: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for value in pair:
        dtype, shape, elements = _packed([value])
        digest.update(f"{dtype}{shape}".encode())
        digest.update(elements.tobytes())
    return digest.hexdigest()


def _seed_generators(key: str) -> None:
    """Sets every global generator; takes about 15 microseconds."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, np.uint32))
    torch.default_generator.manual_seed(int.from_bytes(digest[:7], "little"))


def reason(error: Exception) -> str:
    """An error of a user's code, and the line of that code."""
    entries = traceback.extract_tb(error.__traceback__)
    own = [entry for entry in entries if not entry.filename.startswith((_LAUNCHER, "<"))]
    lines = [entry.lineno for entry in own if entry.filename == own[0].filename]
    where = f" ({Path(own[0].filename).name}, line {lines[-1]})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def _form(value: Tensor) -> str:
    """Type and shape, such as ``int64 [8]``."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _kind(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {name} of {', '.join(map(str, value))}"
    return f"a {name} of {len(value)}" if isinstance(value, tuple | list) else f"a {name}"
