"""The tokenizers: text to ids and back, none of which adds a token of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher.base.errors import ConfigError, Fault
from launcher.contract.data.config import BYTES, DataConfig

Ids = NDArray[np.integer[Any]]


class Encoder(Protocol):
    """A tokenizer."""

    def encode(self, texts: Sequence[bytes]) -> list[Ids]:
        """The ids of some texts.

        Raises:
            UnicodeDecodeError: when one is not UTF-8 and the tokenizer is not that of bytes.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""


def open_encoder(data: DataConfig) -> Encoder | None:
    """The tokenizer that the data name; None where the sources hold ids.

    Raises:
        ConfigError: when its library does not read it.
    """
    if data.tokenizer is None:
        return None
    if data.tokenizer == BYTES:
        return _Bytes()
    path = os.path.expanduser(data.tokenizer)
    is_json = path.endswith(".json")
    try:
        return _HuggingFace(path) if is_json else _SentencePiece(path)
    except Exception as error:  # neither library has a class of its own for it
        rule = f"the package {'tokenizers' if is_json else 'sentencepiece'} cannot read it: {error}"
        fix = "Correct it, or install the version of the package that wrote it."
        raise ConfigError([Fault("data.tokenizer", data.tokenizer, rule, fix)]) from error


class _Bytes:
    def encode(self, texts: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class _HuggingFace:
    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(path)
        self._tokenizer.no_truncation()  # a file may say that texts are cut, and filled up
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[bytes]) -> list[Ids]:
        words = [text.decode() for text in texts]
        found = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int64) for each in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([*ids], skip_special_tokens=False))


class _SentencePiece:
    def __init__(self, path: str) -> None:
        from sentencepiece import SentencePieceProcessor

        self._tokenizer: Any = SentencePieceProcessor(model_file=path)

    def encode(self, texts: Sequence[bytes]) -> list[Ids]:
        found = self._tokenizer.encode([text.decode() for text in texts], out_type=int)
        return [np.array(ids, dtype=np.int64) for ids in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([*map(int, ids)]))
