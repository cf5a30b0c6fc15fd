"""Where the tokens of a source are kept, and what is known of them.

    CACHE/.tokens-UID/NAME.json         `Prepared`: the parts in their order
    CACHE/.tokens-UID/NAME.bin, .idx    a part that was made of text, in Megatron's layout

Names are digests of what the tokens depend on: paths, sizes and times of files, the tokenizer's content, and
the settings that say what is read. What is changed gets another name; a later run finds what is there. Token
ids that exist already stay where they are: of them only the list is made, once their ids were looked at. A
list is written after all of its parts, so what it names is whole.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.base.files import read_json
from launcher.contract.data.config import DataConfig
from launcher.contract.data.files import SourceFile
from launcher.contract.data.token_files import bin_and_index
from launcher.contract.data.tokenizer import read_tokenizer
from launcher.contract.inputs.text import blocks_per_file, file_digests
from launcher.typed.read import Reading, read

_VERSION = 1
"""Of how tokens are made: another one gives other names."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens in a file, and what was found as they were made or looked at."""

    path: str
    """A name in the folder of tokens; absolute where the file is the user's own."""
    dtype: str
    offset: int
    num_tokens: int
    num_documents: int | None
    highest: int
    """The highest id; -1 where there is none."""
    num_empty: int = 0
    """Documents without text, which are left out."""
    num_source_bytes: int = 0
    """Bytes of text that it was made of; 0 where it was not."""

    @property
    def is_made(self) -> bool:
        """Whether it was made of text."""
        return not os.path.isabs(self.path)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The tokens of a source."""

    parts: tuple[Part, ...]
    digests: Mapping[str, str]
    """Of the parts that were made, as `launcher.contract.inputs.text.file_digests` gives them."""

    @property
    def num_tokens(self) -> int:
        """Of all parts."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def highest(self) -> int:
        """The highest id; -1 where there is none."""
        return max((part.highest for part in self.parts), default=-1)


def cache_folder(data: DataConfig, root: str) -> Path:
    """Where the tokens of all sources are kept. ``root``: of the runs."""
    return Path(os.path.expanduser(data.cache_dir or root)) / f".tokens-{os.geteuid()}"


def name_of(data: DataConfig, files: Sequence[object]) -> str:
    """The name of what is made of some files, or of ranges of them, under these settings."""
    tokenizer = read_tokenizer(data)
    facts = (_VERSION, tokenizer, data.text_field, data.bin_format, [_facts(file) for file in files])
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _facts(file: object) -> object:
    if not isinstance(file, SourceFile):
        return file
    state = file.path.stat()
    return os.path.abspath(file.path), file.kind, state.st_size, state.st_mtime_ns


def list_path(data: DataConfig, files: Sequence[SourceFile], folder: Path) -> Path:
    """Where the list of the tokens of some files is, or will be."""
    return folder / f"{name_of(data, files)}.json"


def read_prepared(path: Path) -> Prepared | None:
    """The tokens of a source whose list is at ``path``; None where there are none that are whole."""
    with suppress(OSError):
        if is_of_others(path.parent.lstat()) or is_of_others(path.lstat()):
            return None
        found = read(Prepared, read_json(path), Reading())
        if found is not None and all(is_whole(path.parent, part) for part in found.parts if part.is_made):
            return found
    return None


def is_intact(folder: Path, found: Prepared) -> bool:
    """Whether the parts that were made hold what was written, as far as `digests_of` looks."""
    with suppress(OSError):
        return digests_of(folder, found.parts) == dict(found.digests)
    return False


def digests_of(folder: Path, parts: Sequence[Part]) -> dict[str, str]:
    """Digests of the parts that were made: of up to 64 MiB in all of each byte, of more of blocks of it."""
    files = [bin_and_index(folder / part.path)[0] for part in parts if part.is_made]
    return file_digests(files, blocks_per_file(files)) if files else {}


def is_whole(folder: Path, part: Part) -> bool:
    """Whether both files of a part that was made are there, in their size, and this user's alone."""
    content, index = bin_and_index(folder / part.path)
    with suppress(OSError):
        facts = [content.lstat(), index.lstat()]
        are_files = all(stat.S_ISREG(each.st_mode) and not is_of_others(each) for each in facts)
        return are_files and facts[0].st_size == part.num_tokens * int(part.dtype[-1])
    return False


def is_of_others(facts: os.stat_result) -> bool:
    """Whether somebody else than this user owns or can write a file or folder."""
    return facts.st_uid != os.geteuid() or bool(facts.st_mode & _OTHERS_WRITE)
