"""The settings of what is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from launcher.typed.read import Conditions, read_if, read_unless, read_where, read_while
from launcher.typed.scalars import PositiveFloat, Probability, Range
from launcher.typed.trust import OF_READER, READS_FILES, names_code

BYTES, AUTO, FIELD = "bytes", "auto", "text"
FORMAT: Literal["uint16"] = "uint16"
"""The defaults of ``tokenizer``, ``end_of_document``, ``text_field`` and ``bin_format``."""


def _is_list(source: Any) -> bool:
    return not isinstance(source, str)


def _of_text(neutral: str) -> Conditions:
    """Metadata of a field that is about what is tokenised."""
    return read_if(*(read_unless(f"data.{name}", None, neutral=neutral) for name in ("source", "tokenizer")))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    name: str
    """Name shown in the report."""
    source: str | tuple[str, ...] | None = field(metadata=READS_FILES)
    """``package:NAME/glob`` inside an installed package, or a path or glob of files, or a list of such, each
    a source of a blend. Text; ``.jsonl``, also ``.gz`` and ``.zst``; ``.parquet``; or token ids: ``.bin``
    alone (nanoGPT) or with its ``.idx`` (Megatron), ``.npy``."""
    weights: tuple[PositiveFloat, ...] = field(
        default=(), metadata=read_where("``data.source`` is a list", _is_list, "data.source")
    )
    """Of a blend, the share of the samples from each source, in their order; any scale."""
    eval_source: str | None = field(
        default=None, metadata={**read_unless("data.source", None), **READS_FILES}
    )
    """What is evaluated on, as ``source``; null = a part of the training data, by ``eval_fraction``."""
    tokenizer: str | None = field(metadata={**read_unless("data.source", None, neutral=BYTES), **READS_FILES})
    """``bytes``: one token per byte, vocabulary 256; or a file: ``tokenizer.json`` of Hugging Face, or a
    ``.model`` of SentencePiece; null = the sources hold token ids already."""
    end_of_document: str | None = field(default=AUTO, metadata=_of_text(AUTO))
    """Token that is put after each document, such as ``<|endoftext|>``; ``auto`` = the tokenizer's own, of
    ``bytes`` a zero byte after a record and nothing after a text file; null = none."""
    text_field: str = field(default=FIELD, metadata=_of_text(FIELD))
    """Field of each record (``.jsonl``) or column (``.parquet``) with the text."""
    bin_format: Literal["uint16", "uint32"] = field(
        default=FORMAT, metadata=read_unless("data.source", None, neutral=FORMAT)
    )
    """Format of the ids in a ``.bin`` without ``.idx``."""
    eval_fraction: Probability = field(metadata=read_while("data.eval_source", None))
    """Share of each source or of the samples, taken from the end, that is only evaluated."""
    prefetch_batches: Annotated[int, Range(minimum=0, maximum=1000)]
    """Steps of data made ready in the background, which are kept in memory: at most 1000; 0 = none."""
    cache_dir: str | None = field(metadata={**read_unless("data.source", None), **OF_READER})
    """Folder of the token files that are made of text, which only its user can read; null = ``run.root``."""
    target: str | None = field(metadata=names_code("launcher.data"))
    """``package.module:function`` that builds a user's own dataset, of pairs (input, target); excludes
    ``source``."""
    options: Mapping[str, Any]
    """Passed to ``target`` as keyword arguments."""

    @property
    def sources(self) -> Mapping[str, str]:
        """What is trained on, by the path of the setting that names it."""
        if self.source is None or isinstance(self.source, str):
            return {} if self.source is None else {"data.source": self.source}
        return {f"data.source[{number}]": source for number, source in enumerate(self.source)}

    @property
    def all_sources(self) -> Mapping[str, str]:
        """With what is evaluated on."""
        evaluated = {} if self.eval_source is None else {"data.eval_source": self.eval_source}
        return {**self.sources, **evaluated}
