"""What a plan has to know of a tokenizer, read from its file without the library that tokenises."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher.base.errors import ConfigError, Fault
from launcher.base.files import read_regular
from launcher.contract.data.config import AUTO, BYTES, DataConfig
from launcher.contract.data.files import Kind

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<eod>", "[SEP]")
"""How tokenizers call the end of a document, the most common first."""
_MAX_BYTES = 1 << 28
"""Of a tokenizer's file."""
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
"""Wire types of protocol buffers."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """The vocabulary of a tokenizer."""

    sha256: str
    """Of its file."""
    num_ids: int
    """Its ids are 0 to ``num_ids - 1``."""
    end_id: int | None
    """Put after each document; None: nothing is."""

    def end_after(self, kind: Kind) -> int | None:
        """What is put after a document of a file of a kind: bytes of text files stand one after the other."""
        return None if self.sha256 == BYTES and kind == "text" else self.end_id


def is_here(data: DataConfig) -> bool:
    """Whether the tokenizer can be read on this machine."""
    return data.tokenizer in (None, BYTES) or _path(data).is_file()


def read_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of the data; None where the sources hold token ids.

    Raises:
        ConfigError: when its file is missing or no tokenizer, or has no such end of a document.
    """
    if data.tokenizer is None:
        return None
    if data.tokenizer == BYTES:
        if data.end_of_document not in (AUTO, None):
            rule = "data.tokenizer=bytes has no token but the 256 bytes"
            ways = ({"data.end_of_document": AUTO}, {"data.end_of_document": None})
            raise ConfigError([Fault("data.end_of_document", data.end_of_document, rule, ways=ways)])
        return Tokenizer(sha256=BYTES, num_ids=256, end_id=0 if data.end_of_document == AUTO else None)
    try:
        facts = _path(data).stat()
        sha256, ids = _vocabulary(_path(data), facts.st_mtime_ns, facts.st_size)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        rule = f"cannot be read as the file of a tokenizer: {why}"
        fix = "Give bytes, a tokenizer.json of Hugging Face's tokenizers, or a .model of SentencePiece."
        raise ConfigError([Fault("data.tokenizer", data.tokenizer, rule, fix)]) from None
    return Tokenizer(sha256=sha256, num_ids=max(ids.values()) + 1, end_id=_end_id(data, ids))


def vocabulary_faults(vocab_size: int | None, num_ids: int | None) -> Iterator[Fault]:
    """A vocabulary of the model that is smaller than that of the tokenizer."""
    if num_ids is not None and vocab_size is not None and vocab_size < num_ids:
        what = "the bytes tokenizer gives" if num_ids == 256 else "data.tokenizer has"
        rule = f"{what} {num_ids} different tokens, and each needs its row"
        yield Fault("model.vocab_size", vocab_size, rule, ways=({"model.vocab_size": num_ids},))


def _path(data: DataConfig) -> Path:
    return Path(os.path.expanduser(str(data.tokenizer)))


def _end_id(data: DataConfig, ids: Mapping[str, int]) -> int | None:
    end = data.end_of_document
    if end == AUTO:
        end = next((token for token in _END_TOKENS if token in ids), AUTO)
    if end is None or end in ids:
        return None if end is None else ids[end]
    rule = f"{data.tokenizer} has no such token"
    if end == AUTO:
        rule = f"{data.tokenizer} has none of the tokens that usually end a document"
    fix = "Give the token that ends one, or null for none."
    way = {"data.end_of_document": None}
    raise ConfigError([Fault("data.end_of_document", data.end_of_document, rule, fix, ways=(way,))])


@lru_cache(maxsize=4)
def _vocabulary(path: Path, modified_ns: int, size: int) -> tuple[str, Mapping[str, int]]:
    """Digest of a tokenizer's file, and the ids of its tokens."""
    if size > _MAX_BYTES:
        raise ValueError(f"it has {size} bytes, and {_MAX_BYTES} is the most that is read")
    content = read_regular(path)
    ids = _of_json(content) if path.suffix == ".json" else _of_sentencepiece(content)
    if not ids:
        raise ValueError("it has no vocabulary")
    return hashlib.sha256(content).hexdigest(), ids


def _of_json(content: bytes) -> dict[str, int]:
    """The tokens of ``tokenizer.json``: a vocabulary by token (BPE, WordPiece) or in order (Unigram)."""
    try:
        whole: Any = json.loads(content)
        vocabulary, added = whole["model"]["vocab"], whole.get("added_tokens") or []
        if isinstance(vocabulary, list):
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        ids = {**vocabulary, **{token["content"]: token["id"] for token in added}}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise ValueError("it holds no model.vocab") from None
    if not all(isinstance(number, int) and number >= 0 for number in ids.values()):
        raise ValueError("the ids of its vocabulary are not whole numbers")
    return ids


def _of_sentencepiece(content: bytes) -> dict[str, int]:
    """The pieces of a SentencePiece model: field 1 of the message, each with its text as field 1.

    Source: sentencepiece_model.proto, https://protobuf.dev/programming-guides/encoding
    """
    try:
        pieces = [dict(_fields(piece))[1] for number, piece in _fields(content) if number == 1]
        return {piece.decode(): number for number, piece in enumerate(pieces)}
    except (IndexError, KeyError, UnicodeDecodeError):
        raise ValueError("it is no SentencePiece model") from None


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a message that are bytes, by number."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == _LENGTH:
            length, position = _varint(message, position)
            if position + length > len(message):
                raise IndexError
            yield number, message[position : position + length]
            position += length
        elif wire_type == _VARINT:
            _, position = _varint(message, position)
        elif wire_type in (_FOUR_BYTES, _EIGHT_BYTES):
            position += 4 if wire_type == _FOUR_BYTES else 8
        else:
            raise IndexError


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
    raise IndexError
