"""What is in the tokens of a source, as lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from launcher.base.units import counted, format_bytes
from launcher.contract.data.config import DataConfig
from launcher.contract.data.files import source_files
from launcher.contract.data.prepared import Part, Prepared, cache_folder
from launcher.contract.data.samples import num_windows, training_tokens
from launcher.contract.data.token_files import bin_and_index
from launcher.contract.data.tokenizer import read_tokenizer
from launcher.runtime.tokens.encoders import open_encoder
from launcher.runtime.tokens.shards import memory_map

_NUM_WINDOWS, _WINDOW = 3, 48
_MAX_WIDTH = 78


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What of the training is told with the tokens."""

    vocab_size: int | None
    seq_length: int
    global_size: int


def shown(data: DataConfig, setting: str, root: str, found: Prepared, asked: Asked) -> Iterator[str]:
    """A source: its files, documents and tokens, how long they last, some of them decoded, and what is
    wrong."""
    yield f"{setting}: {data.all_sources[setting]}"
    parts = [part for part in found.parts if part.num_tokens]
    made = [part for part in parts if part.is_made]
    files = source_files(data, setting)
    yield f"  {counted(len(files), 'file')} of {format_bytes(sum(file.size for file in files))}"
    documents = [part.num_documents for part in found.parts]
    known = [number for number in documents if number is not None]
    num_known = sum(known)
    count = f"{num_known:,} document{'s' * (num_known != 1)}"
    count = count if len(known) == len(documents) else "documents are not told apart"
    yield f"  {count}; {found.num_tokens:,} tokens, ids up to {found.highest}, as {_formats(parts)}"
    if num_bytes := sum(part.num_source_bytes for part in made):
        tokens = sum(part.num_tokens for part in made)
        # Of a compressed file the bytes are those of the file.
        yield f"  {tokens / num_bytes:.3g} tokens per byte of its files"
    trained = found.num_tokens if setting == "data.eval_source" else training_tokens(data, found.num_tokens)
    samples = num_windows(trained, asked.seq_length)
    if setting != "data.eval_source":
        steps = samples / asked.global_size
        told = f"{trained:,} tokens = {samples:,} samples of {asked.seq_length}"
        yield f"  an epoch: {told} = {steps:,.1f} steps of {asked.global_size}"
    yield from (f"  wrong: {problem}" for problem in _problems(data, found, asked))
    yield from _windows(data, root, parts)


def _formats(parts: list[Part]) -> str:
    return ", ".join(sorted({np.dtype(part.dtype).name for part in parts})) or "nothing"


def _problems(data: DataConfig, found: Prepared, asked: Asked) -> Iterator[str]:
    tokenizer = read_tokenizer(data)
    limits = {"model.vocab_size": asked.vocab_size}
    if tokenizer is not None:
        limits["data.tokenizer"] = tokenizer.num_ids
    for name, limit in limits.items():
        if limit is not None and found.highest >= limit:
            yield f"the id {found.highest}, and ids of {name} are 0 to {limit - 1}"
    if num_empty := sum(part.num_empty for part in found.parts):
        yield f"{counted(num_empty, 'empty document')}, left out"
    if not found.num_tokens:
        yield "no token at all"


def _windows(data: DataConfig, root: str, parts: list[Part]) -> Iterator[str]:
    """The beginnings of some parts, decoded; ids where there is no tokenizer."""
    encoder, folder = open_encoder(data), cache_folder(data, root)
    for part in parts[:: max(1, len(parts) // _NUM_WINDOWS)][:_NUM_WINDOWS]:
        path = str(bin_and_index(folder / part.path)[0]) if part.is_made else part.path
        ids = memory_map(replace(part, path=path))[:_WINDOW].tolist()
        text = repr(encoder.decode(ids)) if encoder else " ".join(map(str, ids))
        yield f"  begins: {text[:_MAX_WIDTH]}{'...' if len(text) > _MAX_WIDTH else ''}"
