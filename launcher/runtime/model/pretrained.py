"""Initial weights from a folder in Hugging Face's format, for any layout: each rank reads its own slices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launcher.base.errors import JobError
from launcher.contract.config import ModelConfig
from launcher.contract.data_files import CONFIG, INDEX, WEIGHTS
from launcher.runtime.checkpoint.fragments import LOSS_SCALE, NUM_GOOD_STEPS, STEP
from launcher.runtime.model.hugging_face import FileTensor, config_differences, file_tensors
from launcher.runtime.train.optimizer import LossScale

_PREFIX = "transformer."
"""Missing from the names in GPT-2 files that were saved without a head."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where a weight is in the files."""

    file: Path
    name: str
    tensor: FileTensor
    first_row: int
    """First row of our tensor in the joined one."""


class Pretrained:
    """Read as a checkpoint of step 0: weights from the files, and an optimizer without history."""

    def __init__(self, folder: Path, model: ModelConfig, seq_length: int) -> None:
        """Locates every weight.

        Raises:
            JobError: when the folder is not in the format, or holds another model.
        """
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError(f"{CONFIG} holds no object")
            files = _files(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise JobError(f"train.init_from={folder}: no model in Hugging Face's format: {error}") from error
        if differences := config_differences(config, model, seq_length):
            raise JobError(f"train.init_from={folder}: another model: {'; '.join(differences)}")
        self._sources: dict[str, _Source] = {}
        for tensor in file_tensors(model, seq_length):
            name = next((n for n in (tensor.name, tensor.name.removeprefix(_PREFIX)) if n in files), None)
            if name is None:
                raise JobError(f"train.init_from={folder}: {tensor.name} is in no file of it")
            first_row = 0
            for own, shape in tensor.parts:
                self._sources[own] = _Source(file=files[name], name=name, tensor=tensor, first_row=first_row)
                first_row += shape[0]

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of ``shape`` that begins at ``offset``, of a weight or of the optimizer's state."""
        scalars = {STEP: 0.0, LOSS_SCALE: LossScale().value, NUM_GOOD_STEPS: 0.0}
        if name in scalars:
            return torch.tensor(scalars[name])
        kind, _, own = name.partition("/")
        if kind != "weight":
            return torch.zeros(tuple(shape))
        source = self._sources[own]
        spans = [slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True)]
        spans[0] = slice(spans[0].start + source.first_row, spans[0].stop + source.first_row)
        with safe_open(source.file, framework="pt") as file:
            is_transposed = source.tensor.is_transposed
            box: Tensor = file.get_slice(source.name)[tuple(spans[::-1] if is_transposed else spans)]
        return (box.T if is_transposed else box).float()


def _files(folder: Path) -> dict[str, Path]:
    """The file of every tensor, by the name of the tensor."""
    index = folder / INDEX
    if index.exists():
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in where.items()}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / WEIGHTS)
