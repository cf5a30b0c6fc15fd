"""Reads the documents of text files, of JSON records and of Parquet columns, in ranges that cores share."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from launcher.base.errors import ConfigError, Fault
from launcher.contract.data.config import DataConfig
from launcher.contract.data.files import GZIP, ZSTD, Kind, SourceFile

_MAX_LINE = 1 << 26
"""Bytes of a record."""
_CHUNK = 1 << 20
"""Bytes of a text that are tokenised at a time, at least, to the end of a line or of a character."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Some documents of a file, or of a text a part."""

    path: str
    """Absolute."""
    kind: Kind
    compression: str
    modified_ns: int
    start: int
    """Byte in which the first line begins, or after which; of columns the first row group."""
    stop: int
    """The same of the line that follows the last."""
    size: int
    """Bytes of it."""
    is_last: bool = True
    """Whether it reaches the end of the file."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A document, or a part of a long one."""

    text: bytes
    ends: bool = True
    """Whether the document ends with it."""


def ranges_of(file: SourceFile, size: int) -> list[Range]:
    """A file in ranges of about ``size`` bytes, which depend on nothing but the file."""
    facts = file.path.stat()
    whole = Range(
        path=os.path.abspath(file.path),
        kind=file.kind,
        compression=file.compression,
        modified_ns=facts.st_mtime_ns,
        start=0,
        stop=facts.st_size,
        size=facts.st_size,
    )
    if file.kind == "columns":
        return _row_groups(whole, size)
    if file.compression or whole.size <= size:
        return [whole]
    starts = range(0, whole.size, size)
    stops = [*starts[1:], whole.size]
    return [
        replace(whole, start=start, stop=stop, size=stop - start, is_last=stop == whole.size)
        for start, stop in zip(starts, stops, strict=True)
    ]


def pieces_of(part: Range, field: str) -> Iterator[Piece]:
    """The documents of a range, in order; of a record or a row what is in ``field``.

    Raises:
        ValueError, OSError, EOFError: at what is not what the name of its file says.
    """
    if part.kind == "columns":
        return _columns(part, field)
    return _records(part, field) if part.kind == "records" else _text(part)


@contextmanager
def told(path: str, data: DataConfig, setting: str) -> Iterator[None]:
    """Tells what cannot be read in a file as a fault of its source."""
    libraries: tuple[Any, ...] = ()
    if path.endswith(ZSTD):
        from zstandard import ZstdError

        libraries = (ZstdError,)
    known: Any = (ValueError, OSError, EOFError, zlib.error, *libraries)
    try:
        yield
    except known as error:
        rule, fix = f"{path} cannot be read: {error}", "Correct it, or leave it out."
        if isinstance(error, _WrongError):
            rule, fix = f"{path} {error}", error.fix
        raise ConfigError([Fault(setting, data.all_sources[setting], rule, fix)]) from error


class _WrongError(ValueError):
    """What is in a file is not what its name says."""

    def __init__(self, rule: str, fix: str = "Correct it, or leave it out.") -> None:
        super().__init__(rule)
        self.fix = fix


def _text(part: Range) -> Iterator[Piece]:
    """A text as one document. It is cut after the line that fills a chunk."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    chunk: list[bytes] = []
    size = 0
    for _, line in _lines(part, _CHUNK):
        if size >= _CHUNK:  # only with more to come: what ends a document is never empty
            text = b"".join(chunk)
            decoder.decode(text)
            cut = len(text) - len(decoder.getstate()[0])  # not within a character
            decoder.reset()
            yield Piece(text=text[:cut], ends=False)
            chunk, size = [text[cut:]], len(text) - cut
        chunk.append(line)
        size += len(line)
    yield Piece(text=b"".join(chunk), ends=part.is_last)


def _records(part: Range, name: str) -> Iterator[Piece]:
    for place, line in _lines(part, _MAX_LINE):
        if not line.strip():
            continue
        where = f"at byte {place}" + (" of what is compressed in it" if part.compression else "")
        if len(line) == _MAX_LINE:
            raise _WrongError(f"has {where} a record of more than {_MAX_LINE >> 20} MiB")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise _WrongError(f"has {where} a line that is no JSON object")
        text = record.get(name)
        if not isinstance(text, str):
            raise _no_field(f"has {where} a record without a text", name, [*record])
        yield Piece(text=text.encode("utf-8", "replace"))


def _no_field(rule: str, name: str, others: Sequence[Any]) -> _WrongError:
    if name in others:
        return _WrongError(f"{rule} in the field {name}")
    found = ", ".join(map(str, others[:10])) or "none"
    return _WrongError(f"{rule} in the field {name}", f"Set data.text_field to one of its fields: {found}.")


def _lines(part: Range, limit: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a range, each with its place, in pieces of at most ``limit`` bytes."""
    with _opened(part) as file:
        place = part.start
        if place:
            file.seek(place - 1)
            while (rest := file.readline(limit)) and not rest.endswith(b"\n"):
                place += len(rest)
            place += len(rest) - 1
        begins = True
        while (place < part.stop or part.compression or not begins) and (line := file.readline(limit)):
            yield place, line
            place += len(line)
            begins = line.endswith(b"\n")


@contextmanager
def _opened(part: Range) -> Iterator[BinaryIO]:
    with open(part.path, "rb") as file:
        if part.compression == GZIP:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked  # type: ignore[misc]
        elif part.compression == ZSTD:
            from zstandard import ZstdDecompressor

            reader: Any = ZstdDecompressor().stream_reader(file, read_across_frames=True)
            yield io.BufferedReader(reader, 1 << 20)
        else:
            yield file


def _row_groups(whole: Range, size: int) -> list[Range]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(whole.path) as file:
        sizes = [file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups)]
    groups: list[Range] = []
    first = 0
    for index, _ in enumerate(sizes):
        if (held := sum(sizes[first : index + 1])) >= size or index == len(sizes) - 1:
            groups.append(replace(whole, start=first, stop=index + 1, size=held))
            first = index + 1
    return groups


def _columns(part: Range, name: str) -> Iterator[Piece]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(part.path) as file:
        if name not in file.schema_arrow.names:
            raise _no_field("has no column of texts", name, file.schema_arrow.names)
        groups = [*range(part.start, part.stop)]
        for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=[name]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise _no_field("has a row without a text", name, file.schema_arrow.names)
                yield Piece(text=text.encode("utf-8", "replace"))
