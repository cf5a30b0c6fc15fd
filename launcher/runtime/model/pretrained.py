"""Initial weights from a folder in Hugging Face's format, for any layout: each rank reads what it holds."""

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
from launcher.runtime.model.hugging_face import Stored, config_differences, stored_tensors
from launcher.runtime.train.optimizer import LossScale

_PREFIX = "transformer."
"""Left out of the names in files of GPT-2 that were saved without a head."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    file: Path
    name: str
    tensor: Stored
    first_row: int
    """Where our tensor begins in the joined one."""


class Pretrained:
    """Reads as a checkpoint of no step: weights from the files, and an optimizer that knows nothing yet."""

    def __init__(self, folder: Path, model: ModelConfig, seq_length: int) -> None:
        """Looks where everything is.

        Raises:
            JobError: when the folder is not one of the format, or holds another model.
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
        self._places: dict[str, _Place] = {}
        for tensor in stored_tensors(model, seq_length):
            name = next((n for n in (tensor.name, tensor.name.removeprefix(_PREFIX)) if n in files), None)
            if name is None:
                raise JobError(f"train.init_from={folder}: {tensor.name} is in no file of it")
            first_row = 0
            for own, shape in tensor.parts:
                self._places[own] = _Place(file=files[name], name=name, tensor=tensor, first_row=first_row)
                first_row += shape[0]

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of ``shape`` that begins at ``offset``, of a weight or of the optimizer's state."""
        scalars = {STEP: 0.0, LOSS_SCALE: LossScale().value, NUM_GOOD_STEPS: 0.0}
        if name in scalars:
            return torch.tensor(scalars[name])
        kind, _, own = name.partition("/")
        if kind != "weight":
            return torch.zeros(tuple(shape))
        place = self._places[own]
        spans = [slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True)]
        spans[0] = slice(spans[0].start + place.first_row, spans[0].stop + place.first_row)
        with safe_open(place.file, framework="pt") as file:
            is_transposed = place.tensor.is_transposed
            box: Tensor = file.get_slice(place.name)[tuple(spans[::-1] if is_transposed else spans)]
        return (box.T if is_transposed else box).float()


def _files(folder: Path) -> dict[str, Path]:
    """The file of every tensor by its name."""
    index = folder / INDEX
    if index.exists():
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in where.items()}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / WEIGHTS)
