"""Text in aligned columns, and wrapped text with a hanging indent."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """One line per row; the first ``left`` columns are aligned left, the others right.

    >>> columns([["part", "bytes"], ["weights", "12"]])
    ['part     bytes', 'weights     12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [f"{{:{'<' if index < left else '>'}{width}}}" for index, width in enumerate(widths)]
    return ["  ".join(cells).format(*row).rstrip() for row in rows]


def cropped(items: Sequence[T], first: int, last: int) -> tuple[list[T], list[T]]:
    """All items and none when they are few, else the first and the last ones.

    >>> cropped(range(5), 3, 2), cropped(range(9), 3, 2)
    (([0, 1, 2, 3, 4], []), ([0, 1, 2], [7, 8]))
    """
    if len(items) <= first + last:
        return list(items), []
    return list(items[:first]), list(items[-last:])


def wrapped(head: str, text: str, width: int) -> str:
    """``text`` after ``head``, further lines indented to align; words are never split."""
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
