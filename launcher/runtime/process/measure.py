"""Measures a user's own model and data: `python -m launcher.runtime.process.measure < request.json`.

The request holds ``model`` (null where it is not the user's), ``data``, ``seq_length`` and ``compute``, as in
the configuration, and the ``source_roots`` of the plan. The answer is a
`launcher.contract.model.shape.Measured`; with exit code 1 it is a list of faults. The planner runs this in a
process of its own, so that it needs no torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import torch
from torch import Tensor

from launcher.base.errors import ConfigError, Fault
from launcher.contract.config import ModelConfig
from launcher.contract.data.config import DataConfig
from launcher.contract.model.shape import Measured
from launcher.runtime.api import DTYPES
from launcher.runtime.data.own_data import OwnData, reason
from launcher.runtime.model.measure_shape import describe
from launcher.runtime.model.user_model import load_custom
from launcher.runtime.process.module_path import add_source_roots
from launcher.runtime.process.supervise import end_with
from launcher.typed.read import plain, read_or_raise


def main(answer: TextIO) -> int:
    """Measures what one request names. Returns the exit code."""
    request = json.load(sys.stdin)
    add_source_roots(request["source_roots"])
    try:
        found = measured(request)
    except ConfigError as error:
        print(json.dumps([vars(fault) for fault in error.faults], default=str), file=answer)
        return 1
    except Exception as error:  # the user's code may raise anything
        name = "model" if request["model"] else "data"
        fault = Fault(f"{name}.target", request[name]["target"], f"could not be measured: {reason(error)}")
        print(json.dumps([vars(fault)]), file=answer)
        return 1
    print(json.dumps(plain(found), allow_nan=False), file=answer)
    return 0


def measured(request: dict[str, Any]) -> Measured:
    """What a request names, measured.

    Raises:
        ConfigError: when it cannot be made, or could not be trained.
    """
    data, seq_length = read_or_raise(DataConfig, request["data"], "data"), request["seq_length"]
    if request["model"] is None:
        return Measured(model=None, num_samples=measured_rows(data, seq_length))
    model = read_or_raise(ModelConfig, request["model"], "model")
    try:
        samples, num_samples = first_inputs(data, seq_length)
    except ConfigError as error:  # told together with what is wrong with the model alone
        raise ConfigError([*error.faults, *_faults_without_data(model)]) from None
    return Measured(model=describe(model, samples, DTYPES[request["compute"]]), num_samples=num_samples)


def _faults_without_data(model: ModelConfig) -> Sequence[Fault]:
    """Those of a model that are seen before it gets a sample."""
    try:
        load_custom(model, seed=0)
    except ConfigError as error:
        return error.faults
    return ()


def measured_rows(data: DataConfig, seq_length: int) -> int:
    """How many samples a user's own dataset has for a language model, of which the first is looked at.

    Raises:
        ConfigError: when it cannot be made, or its first item is no row of ``seq_length`` token ids.
    """
    rows = OwnData(data, seed=0, seq_length=seq_length)
    if len(rows):
        rows.item(0, 0)
    return len(rows)


def first_inputs(data: DataConfig, seq_length: int) -> tuple[Tensor, int | None]:
    """The inputs of the first two samples [2, ...], of one [1, ...] where they are equal or there are no two,
    and how many samples a user's own dataset has.

    Raises:
        ConfigError: when the user's dataset cannot be made, or one of the items cannot be read.
    """
    if data.target is None:
        return torch.arange(seq_length)[None] % 256, None
    samples = OwnData(data, seed=0)
    inputs = [samples.item(0, index)[0] for index in range(min(2, len(samples) or 1))]
    return torch.stack(inputs[:1] if inputs[0].equal(inputs[-1]) else inputs), len(samples)


if __name__ == "__main__":
    end_with(os.getppid())
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)  # the user's code may print, and what it starts
        code = main(pipe)
    sys.exit(code)
