"""Expands Slurm's hostlists, such as ``node[01-03,07]``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import product
from math import prod

from launcher.base.errors import LauncherError

MAX_NODES = 65536
"""More names than this are taken for a mistyped range."""
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> tuple[str, ...]:
    """The node names of a hostlist, in its order; zero padding is kept.

    Several brackets in one name vary like nested loops, the last one fastest.

    >>> expand("alpha,node[08-10]"), expand("r[0-1]n[1,3]-ib")
    (('alpha', 'node08', 'node09', 'node10'), ('r0n1-ib', 'r0n3-ib', 'r1n1-ib', 'r1n3-ib'))

    Raises:
        LauncherError: for text in any other format.
    """
    names: list[str] = []
    position = 0
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise _wrong(text, "a name is missing" if position == len(text) else f"at {text[position:]!r}")
        names += _item_names(item[0], text)
        if len(names) > MAX_NODES:
            raise _wrong(text, f"more than {MAX_NODES} nodes")
        position = item.end()
        if position == len(text):
            return tuple(names)
        if text[position] != ",":
            raise _wrong(text, f"at {text[position:]!r}")
        position += 1


def main(words: list[str]) -> int:
    """Prints the names of one list, one a line; returns the exit code."""
    try:
        print("\n".join(expand(words[0] if words else "")))
    except LauncherError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _item_names(item: str, text: str) -> Iterator[str]:
    parts = [
        [literal] if literal else list(_numbers(ranges, text)) for ranges, literal in _PART.findall(item)
    ]
    for part in parts:
        if not all(_NAME.fullmatch(text_) for text_ in part):
            raise _wrong(text, "a name holds letters, digits, . _ and -")
    if prod(map(len, parts)) > MAX_NODES:
        raise _wrong(text, f"more than {MAX_NODES} nodes")
    for texts in product(*parts):
        yield "".join(texts)


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """The numbers of one pair of brackets: ``001,003-004`` gives 001, 003 and 004."""
    for written in ranges.split(","):
        match = _RANGE.fullmatch(written)
        if match is None:
            raise _wrong(text, f"{written!r} is neither a number nor FIRST-LAST")
        first, last = match[1], match[2] or match[1]
        is_padded = first.startswith("0") and len(first) > 1
        if int(last) < int(first) or (is_padded and len(first) != len(last)):
            raise _wrong(text, f"{written!r} is no rising range with one width")
        if int(last) - int(first) >= MAX_NODES:
            raise _wrong(text, f"more than {MAX_NODES} nodes")
        width = len(first) if is_padded else 0
        yield from (f"{number:0{width}d}" for number in range(int(first), int(last) + 1))


def _wrong(text: str, reason: str) -> LauncherError:
    return LauncherError(
        f"{text!r} is no list of nodes ({reason}). Give names and ranges, such as node[01-03,07],gpu1."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
