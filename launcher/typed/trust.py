"""Which settings name code or files, and which the reader alone gives: a mark beside the field of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.typed.read import field_types, join


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What a recipe may do with a setting."""

    kind: Literal["code", "files", "reader"]
    """``code``: it names what is run; ``files``: what is read; ``reader``: no recipe may set it."""
    entry_group: str = ""
    """Of code: the entry points by which an installed package declares what recipes may name."""

    def __str__(self) -> str:
        if self.kind == "reader":
            return "Given by the reader alone: in their own folder, or on the command line."
        if self.kind == "files":
            return "From a recipe, files outside of its folder are read only where that folder is trusted."
        return "From a recipe it is run only where the recipe's folder is trusted."


OF_READER: Mapping[str, Mark] = {"trust": Mark(kind="reader")}
"""Metadata of a field, or of a whole group, that no recipe may set."""
READS_FILES: Mapping[str, Mark] = {"trust": Mark(kind="files")}
"""Metadata of a field that names files."""


def names_code(entry_group: str) -> Mapping[str, Mark]:
    """Metadata of a field that names code, which an installed package may declare in this group."""
    return {"trust": Mark(kind="code", entry_group=entry_group)}


def mark_of(item: dataclasses.Field[Any]) -> Mark | None:
    """The mark of a field; None where any recipe may set it."""
    return item.metadata.get("trust")


def marked(cls: type, prefix: str = "") -> Iterator[tuple[str, Mark]]:
    """The marked settings of a class by their path below ``prefix``, each or the group that holds it."""
    for item in dataclasses.fields(cls):
        path, kind = join(prefix, item.name), field_types(cls)[item.name]
        if mark := mark_of(item):
            yield path, mark
        elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from marked(kind, path)


def groups_of_reader(cls: type) -> frozenset[str]:
    """The groups that no recipe may bring files of."""
    return frozenset(path for path, mark in marked(cls) if mark.kind == "reader" and "." not in path)
