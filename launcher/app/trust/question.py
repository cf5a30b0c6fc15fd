"""What a reader is asked before something that a recipe names is run or read, and who answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Named:
    """A setting that names code or files."""

    path: str
    value: str
    where: str
    """The file and line that set it."""
    options: str = ""
    """What code is called with, as JSON."""
    target: str = ""
    """Code outside of the recipe's folder, which is allowed by name, and not with the folder alone."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a reader is asked."""

    folders: tuple[Path, ...]
    """Of the recipe, links resolved."""
    named: tuple[Named, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """The code outside of the folders that is allowed with them."""
        return tuple(named.target for named in self.named if named.target)


Allow = Callable[[Question], bool]
"""Answers a question."""


def never(_: Question) -> bool:
    """Nothing may be run but from folders that are trusted already."""
    return False


def always(_: Question) -> bool:
    """Everything may be run; nothing is remembered."""
    return True
