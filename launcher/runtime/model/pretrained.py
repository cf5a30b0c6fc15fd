"""Initial weights from a folder in Hugging Face's format, for any layout: each rank reads its own slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from launcher.contract.config import ModelConfig
from launcher.contract.model.folder import StoredTensor, locate
from launcher.contract.model.tensors import FileTensor, file_tensors
from launcher.runtime.checkpoint.fragments import LOSS_SCALE, NUM_GOOD_STEPS, STEP
from launcher.runtime.train.optimizer import LossScale


def without_history(name: str, shape: Sequence[int]) -> Tensor:
    """A box of the state of an optimizer that has made no step."""
    scalars = {STEP: 0.0, LOSS_SCALE: LossScale().value, NUM_GOOD_STEPS: 0.0}
    return torch.tensor(scalars[name]) if name in scalars else torch.zeros(tuple(shape))


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where a weight is in the files."""

    stored: StoredTensor
    tensor: FileTensor
    first_row: int
    """First row of our tensor in the joined one."""


class Pretrained:
    """Read as a checkpoint of step 0: weights from the files, and an optimizer without history."""

    def __init__(self, folder: str, model: ModelConfig, seq_length: int) -> None:
        """Locates every weight.

        Raises:
            ConfigError: when the folder is not in the format, or holds another model.
        """
        stored = locate(folder, model, seq_length)
        self._sources: dict[str, _Source] = {}
        for tensor in file_tensors(model, seq_length):
            first_row = 0
            for own, shape in tensor.parts:
                self._sources[own] = _Source(stored=stored[tensor.name], tensor=tensor, first_row=first_row)
                first_row += shape[0]

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of ``shape`` that begins at ``offset``, of a weight or of the optimizer's state."""
        kind, _, own = name.partition("/")
        if kind != "weight":
            return without_history(name, shape)
        source = self._sources[own]
        spans = [slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True)]
        spans[0] = slice(spans[0].start + source.first_row, spans[0].stop + source.first_row)
        with safe_open(source.stored.file, framework="pt") as file:
            is_transposed = source.tensor.is_transposed
            box: Tensor = file.get_slice(source.stored.name)[tuple(spans[::-1] if is_transposed else spans)]
        return (box.T if is_transposed else box).float()
