"""What is wrong with a user's own dataset is told with its target, the item, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launcher.base.errors import ConfigError
from launcher.runtime.data.own_data import OwnData
from tests.helpers.own_data import SEQ, Numbers, config_of, loader_of


class Wrong:
    """Items, of which those from the fourth on are ``bad``."""

    def __init__(self, bad: str) -> None:
        if bad == "file":
            Path("no such file").read_text()
        self._bad = bad

    def __len__(self) -> int:
        return None if self._bad == "length" else 64  # type: ignore[return-value]

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(SEQ)
        return BAD[self._bad][0](row) if index >= 4 and self._bad in BAD else (row, row)


def broken(row: Tensor) -> Any:
    raise ValueError("the file is damaged")


BAD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "raises": (
        broken,
        r"item 8 raised ValueError: the file is damaged \(test_own_data_faults\.py, line \d+\)\. Correct the",
    ),
    "dict": (
        lambda row: {"input_ids": row, "labels": row},
        r"item 8 is a dict of input_ids, labels, not a pair \(input, target\)\. Return two of its values, "
        r"such as \(item\['input_ids'\], item\['labels'\]\)",
    ),
    "one": (lambda row: row, r"item 8 is a Tensor, not a pair \(input, target\)\. Return input and target"),
    "three": (lambda row: (row, row, row), r"item 8 is a tuple of 3, not a pair"),
    "text": (
        lambda row: (row, "yes"),
        r"the target of item 8 is a str\. Return a tensor, a NumPy array or a number",
    ),
    "ragged": (
        lambda row: (row[1:], row[1:]),
        r"the input of item 8 is int64 \[7\], that of item 0 int64 \[8\]\. Pad or cut all to one shape; "
        r"integer targets of -100",
    ),
    "type": (
        lambda row: (row, row.float()),
        r"the target of item 8 is float32 \[8\], that of item 0 int64 \[8\]",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_item_that_is_wrong_is_named(bad: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.target=\S+:Wrong: {BAD[bad][1]}"):
        loader_of(Wrong, family="custom", data={"options": {"bad": bad}})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            "file",
            r"FileNotFoundError: .*'no such file' \(.*, line \d+\)\. Check data\.options={'bad",
        ),
        ("length", "TypeError: 'NoneType' object cannot be interpreted as an integer"),
    ],
)
def test_a_dataset_that_cannot_be_made_says_why(bad: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"Wrong: the dataset could not be made: {message}"):
        loader_of(Wrong, data={"options": {"bad": bad}})


def test_a_dataset_that_is_nowhere_says_so() -> None:
    data = config_of(Numbers, data={"target": f"{__name__}:Missing"}).data
    with pytest.raises(
        ConfigError, match=r"AttributeError: module \S+ has no attribute 'Missing'\. Check data"
    ):
        OwnData(data, seed=0)


@pytest.mark.parametrize(
    ("given", "taken"), [(torch.int32, torch.int64), (torch.uint16, torch.int64), (torch.uint8, torch.uint8)]
)
def test_whole_numbers_are_taken_as_layers_take_them(
    given: torch.dtype, taken: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = torch.ones(3, dtype=given)
    monkeypatch.setattr(Numbers, "__getitem__", lambda self, index: (row, row))
    inputs, targets = OwnData(config_of(Numbers).data, seed=0).item(0, 0)
    assert inputs.dtype == targets.dtype == taken
    assert inputs.tolist() == [1, 1, 1]


def test_a_dataset_that_is_too_small_is_refused() -> None:
    expected = (
        r"batch\.global_size=4: needs as many samples, and the training part of \S+:Numbers has 2: "
        r"give more data\.$"
    )
    with pytest.raises(ConfigError, match=expected):
        loader_of(Numbers, family="custom", data={"options": {"length": 2}})


def test_a_language_model_takes_rows_of_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.arange(SEQ, dtype=np.uint16)
    monkeypatch.setattr(Numbers, "__getitem__", lambda self, index: (row, row))
    inputs, _ = OwnData(config_of(Numbers).data, seed=0, seq_length=SEQ).item(0, 0)
    assert (inputs.dtype, inputs.tolist()) == (torch.int64, list(range(SEQ)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            torch.zeros(SEQ),
            r"the input of item 0 is float32 \[8\]; the model takes batch\.seq_length=8 token ids",
        ),
        (torch.arange(5), r"int64 \[5\].* of shape \[8\], or set batch\.seq_length=5\."),
    ],
)
def test_a_language_model_takes_nothing_else(
    row: Tensor, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Numbers, "__getitem__", lambda self, index: (row, row))
    with pytest.raises(ConfigError, match=message):
        loader_of(Numbers)
