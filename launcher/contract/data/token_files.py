"""The headers of files of token ids: how many there are, in which format, from which byte on."""

from __future__ import annotations

import ast
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.contract.data.config import DataConfig
from launcher.contract.data.files import SourceFile, index_of

MAGIC = b"MMIDIDX\x00\x00"
"""How an index of Megatron begins."""
INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version 1, code of the format, sequences, entries of the list of documents."""
FORMATS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's codes of formats, as numpy writes them.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py (``DType``, ``_IndexWriter``): after the header
the length of each sequence (int32), where it begins in the ``.bin`` (bytes, int64), and the number of the
first sequence of each document, at last that of all sequences (int64)."""
_NPY_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 1 << 16
_NPY_FORMATS = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Token ids in a file, one after the other."""

    path: str
    dtype: str
    """As numpy writes it, such as ``<u2``."""
    offset: int
    """Bytes before the first."""
    num_tokens: int
    num_documents: int | None = None
    """None: the file does not say."""


def token_file(file: SourceFile, data: DataConfig) -> TokenFile:
    """What the header of a file says.

    Raises:
        ValueError: when it is not what it should be; says what it is.
    """
    if file.kind == "npy":
        return _npy(file)
    if file.kind == "megatron":
        return _megatron(file)
    return _sized(file, "<u2" if data.bin_format == "uint16" else "<u4")


def _sized(file: SourceFile, dtype: str) -> TokenFile:
    """A file of nothing but ids."""
    width = int(dtype[-1])
    if file.size % width:
        raise ValueError(
            f"{file.path} has {file.size} bytes, which is no whole number of ids of {width} bytes"
        )
    return TokenFile(path=os.path.abspath(file.path), dtype=dtype, offset=0, num_tokens=file.size // width)


def _megatron(file: SourceFile) -> TokenFile:
    index = index_of(file.path)
    with index.open("rb") as opened:
        header = opened.read(INDEX_HEADER.size)
        size = os.fstat(opened.fileno()).st_size
    if len(header) < INDEX_HEADER.size or not header.startswith(MAGIC):
        raise ValueError(f"{index} is no index of Megatron")
    _, version, code, num_sequences, num_documents = INDEX_HEADER.unpack(header)
    if version != 1 or code not in FORMATS:
        raise ValueError(f"{index} has version {version} and ids of format {code}, which are not read")
    if size != INDEX_HEADER.size + 12 * num_sequences + 8 * num_documents:
        raise ValueError(
            f"{index} has {size} bytes, which {num_sequences} sequences do not fill: it is cut short"
        )
    found = _sized(file, FORMATS[code])
    return replace(found, num_documents=max(0, num_documents - 1))


def _npy(file: SourceFile) -> TokenFile:
    """Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html"""
    with file.path.open("rb") as opened:
        start = opened.read(8)
        width = 2 if start[6:7] == b"\x01" else 4
        length = int.from_bytes(opened.read(width), "little")
        text = opened.read(min(length, _MAX_HEADER)) if start.startswith(_NPY_MAGIC) else b""
    try:
        header = ast.literal_eval(text.decode("latin-1"))
        shape, dtype = header["shape"], header["descr"]
        (num_tokens,) = shape
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        raise ValueError(f"{file.path} is no array of one dimension") from None
    if type(num_tokens) is not int or num_tokens < 0:
        raise ValueError(f"{file.path} is an array of {num_tokens!r} ids, which is no size")
    if not isinstance(dtype, str) or dtype[1:] not in _NPY_FORMATS or dtype[0] not in "<|":
        raise ValueError(f"{file.path} holds {dtype}, and token ids are whole numbers in little-endian order")
    offset = 8 + width + length
    if file.size != offset + num_tokens * int(dtype[-1]):
        raise ValueError(
            f"{file.path} has {file.size} bytes, which {num_tokens} ids do not fill: it is cut short"
        )
    path = os.path.abspath(file.path)
    return TokenFile(path=path, dtype=dtype, offset=offset, num_tokens=num_tokens)


def bin_and_index(path: Path) -> tuple[Path, Path]:
    """The pair of files of a name without suffix."""
    return path.with_suffix(".bin"), path.with_suffix(".idx")
