"""The tokens of a source as one row of ids, memory-mapped from as many files as it has.

They are made by `launcher.runtime.tokens.prepare`, or by the first rank that finds none, while the others
wait. A file is mapped as it is first read, so that thousands are opened in no time. What was made of text and
is damaged, a link, or of somebody else is never used, and made again: every rank that needs tokens looks at
up to 64 MiB of them at its start, and of more files at a block of each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from launcher.contract.data.config import DataConfig
from launcher.contract.data.prepared import Part, cache_folder
from launcher.contract.data.token_files import bin_and_index
from launcher.runtime.process.log import log
from launcher.runtime.tokens.prepare import prepare
from launcher.runtime.tokens.shards import memory_map


class Tokens:
    """Token ids in files, one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """``parts``: with absolute paths."""
        self._parts = [part for part in parts if part.num_tokens]
        self._ends = [*accumulate(part.num_tokens for part in self._parts)]
        self._maps: list[NDArray[np.integer] | None] = [None] * len(self._parts)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """A copy of some ids, from as many files as they are in."""
        found = np.empty(length, dtype=np.int64)
        number, done = bisect_right(self._ends, start), 0
        while done < length:
            first = start + done - (self._ends[number] - self._parts[number].num_tokens)
            some = self._map(number)[first : first + length - done]
            found[done : done + len(some)] = some
            number, done = number + 1, done + len(some)
        return found

    def _map(self, number: int) -> NDArray[np.integer]:
        found = self._maps[number]
        if found is None:
            found = self._maps[number] = memory_map(self._parts[number])
        return found


def open_tokens(data: DataConfig, setting: str, root: str) -> Tokens:
    """The tokens of the source that a setting names. ``root``: of the runs.

    Raises:
        ConfigError: when the source has no file, or one that cannot be read.
        LauncherError: when they have to be made, and the folder of tokens cannot be written.
    """
    folder, parts = cache_folder(data, root), prepare(data, setting, root, log).parts
    made = {part.path: str(bin_and_index(folder / part.path)[0].absolute()) for part in parts if part.is_made}
    return Tokens([replace(part, path=made.get(part.path, part.path)) for part in parts])
