"""Makes one part of the tokens of a source, in a process of its own: the work that cores share."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.base.errors import ConfigError, Fault
from launcher.contract.data.config import DataConfig
from launcher.contract.data.files import SourceFile, index_of
from launcher.contract.data.prepared import Part, name_of
from launcher.contract.data.token_files import INDEX_HEADER, TokenFile, token_file
from launcher.contract.data.tokenizer import read_tokenizer
from launcher.runtime.process.supervise import end_with
from launcher.runtime.tokens.documents import Piece, Range, pieces_of, ranges_of, told
from launcher.runtime.tokens.encoders import Encoder, open_encoder
from launcher.runtime.tokens.indexed import PairWriter, format_of

_NUM_SHARDS = 256
"""About as many a source has, of at least and at most:"""
_SMALLEST, _LARGEST = 4 << 20, 256 << 20
"""Bytes of text."""
_BATCH_BYTES, _BATCH_PIECES = 1 << 20, 1024
"""Documents that are tokenised together."""
_BLOCK = 1 << 24
"""Ids that are looked at together."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Ranges of files whose tokens are one part."""

    name: str
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(part.size for part in self.ranges)


def shards_of(data: DataConfig, setting: str, files: Sequence[SourceFile]) -> list[Shard]:
    """The shards of some files of text, which do not depend on the number of cores."""
    size = min(_LARGEST, max(_SMALLEST, sum(file.size for file in files) // _NUM_SHARDS))
    groups: list[list[Range]] = [[]]
    for file in files:
        with told(str(file.path), data, setting):
            found = ranges_of(file, size)
        for part in found:
            if sum(other.size for other in groups[-1]) >= size:
                groups.append([])
            groups[-1].append(part)
    return [Shard(name=name_of(data, group), ranges=tuple(group)) for group in groups if group]


def start_process(parent: int) -> None:
    """Sets up a process that makes shards: what interrupts it is the end of its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process is on a core of its own
    end_with(parent)


def make_shard(data: DataConfig, setting: str, folder: Path, shard: Shard) -> Part:
    """Tokenises the texts of a shard and writes them into the folder.

    Raises:
        ConfigError: at what cannot be read.
        OSError: when it cannot be written.
    """
    tokenizer, encoder = read_tokenizer(data), open_encoder(data)
    assert tokenizer is not None, "what is tokenised has a tokenizer"
    assert encoder is not None, "what is tokenised has a tokenizer"
    writer, num_documents, num_empty = PairWriter(folder / shard.name, format_of(tokenizer.num_ids)), 0, 0
    try:
        for part in shard.ranges:
            end = tokenizer.end_after(part.kind)
            ending = np.array([] if end is None else [end], dtype=np.int64)
            with told(part.path, data, setting):
                for piece, ids in _encoded(pieces_of(part, data.text_field), encoder):
                    # The end of a long text may stand alone in the range of its last line.
                    is_empty = not piece.text and (part.kind != "text" or not part.start)
                    num_empty += is_empty
                    num_documents += piece.ends and not is_empty
                    whole = np.concatenate([ids, ending]) if piece.ends and not is_empty else ids
                    writer.add(whole)
        writer.close()
    except BaseException:
        writer.discard()
        raise
    return Part(
        path=shard.name,
        dtype=format_of(tokenizer.num_ids),
        offset=0,
        num_tokens=writer.num_tokens,
        num_documents=num_documents,
        highest=writer.highest,
        num_empty=num_empty,
        num_source_bytes=shard.size,
    )


def _encoded(pieces: Iterable[Piece], encoder: Encoder) -> Iterator[tuple[Piece, np.ndarray]]:
    """Each piece with its ids, tokenised in batches."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            yield from zip(batch, encoder.encode([each.text for each in batch]), strict=True)
            batch, size = [], 0
    yield from zip(batch, encoder.encode([each.text for each in batch]), strict=True)


def look_at(data: DataConfig, setting: str, file: SourceFile) -> Part:
    """Looks at the ids of a file once, and at where an index says that documents begin.

    Raises:
        ConfigError: when it is not what its name says, or has an id below 0.
    """
    with told(str(file.path), data, setting):
        found = token_file(file, data)
        ids = memory_map(found)
        if file.kind == "megatron":
            _check_pointers(file, found)
        lowest, highest = 0, -1
        for start in range(0, found.num_tokens, _BLOCK):
            block = ids[start : start + _BLOCK]
            lowest, highest = min(lowest, int(block.min())), max(highest, int(block.max()))
    if lowest < 0:
        rule = f"{file.path} holds the id {lowest}, and none is below 0"
        fix = "Set data.bin_format or the suffix to what it is, or leave it out."
        raise ConfigError([Fault(setting, data.all_sources[setting], rule, fix)])
    return Part(
        path=found.path,
        dtype=found.dtype,
        offset=found.offset,
        num_tokens=found.num_tokens,
        num_documents=found.num_documents,
        highest=highest,
    )


def memory_map(found: TokenFile | Part) -> np.ndarray:
    """The ids of a file, read as they are used. Nothing is unpickled."""
    if not found.num_tokens:
        return np.empty(0, dtype=found.dtype)
    return np.frombuffer(_mapped(found.path), found.dtype, found.num_tokens, found.offset)


def _mapped(path: str) -> mmap.mmap:
    """A file in memory, read as it is used; np.memmap does the same, and takes five times as long."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _check_pointers(file: SourceFile, found: TokenFile) -> None:
    """Has the sequences of an index stand one after the other, as the ids are read."""
    content = _mapped(str(index_of(file.path)))
    count = INDEX_HEADER.unpack_from(content)[3]
    lengths = np.frombuffer(content, "<i4", count, INDEX_HEADER.size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", count, INDEX_HEADER.size + 4 * count)
    ends = np.cumsum(lengths)
    is_contiguous = (pointers == (ends - lengths) * int(found.dtype[-1])).all()
    if not is_contiguous or (ends[-1] if count else 0) != found.num_tokens:
        raise ValueError("its index is not of the sequences in it, one after the other")
