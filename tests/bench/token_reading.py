"""How fast samples are read from token files, beside a bare np.memmap and torch's DataLoader, in one run.

    python -m tests.bench.token_reading [--files 1000] [--megabytes 512] [--seq 2048] [--repeats 7]

One process reads windows of ids of 2 bytes at random places, as int64 tensors: by `Tokens`; by np.memmap, one
for each file, made as the file is first read; and by a DataLoader, in this process and with two workers,
whose dataset is those memmaps. In each repeat every reader takes the same windows, in turn, once after the
kernel was told to drop the files from its cache (cold) and once again (warm). Printed are the medians in MB
of ids per second, each as a share of np.memmap's, and the seconds that opening the files takes.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from launcher.base.machine import cpu_model
from launcher.runtime.data.tokens import Tokens, open_tokens
from tests.helpers.contexts import make_config

WIDTH = 2
"""Bytes of an id."""
Read = Callable[[Sequence[int]], Iterator[Tensor]]


class Windows(Dataset[Tensor]):
    """Windows of files by np.memmap, as a user would write them."""

    def __init__(self, paths: Sequence[Path], per_file: int, length: int, starts: Sequence[int] = ()) -> None:
        self._paths, self._per_file, self._length, self._starts = paths, per_file, length, starts
        self._maps: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Tensor:
        return self.read(self._starts[index])

    def read(self, start: int) -> Tensor:
        """The window that begins at a place of all files."""
        number, first = divmod(start, self._per_file)
        if number not in self._maps:
            self._maps[number] = np.memmap(self._paths[number], np.uint16, "r")
        return torch.from_numpy(self._maps[number][first : first + self._length].astype(np.int64))


def readers(tokens: Tokens, paths: Sequence[Path], per_file: int, length: int) -> dict[str, Read]:
    """Every reader by its name, with nothing mapped."""
    mapped = Windows(paths, per_file, length)

    def ours(starts: Sequence[int]) -> Iterator[Tensor]:
        return (torch.from_numpy(tokens.read(start, length)) for start in starts)

    def loader(num_processes: int) -> Read:
        def read(starts: Sequence[int]) -> Iterator[Tensor]:
            windows = Windows(paths, per_file, length, starts)
            return iter(DataLoader(windows, batch_size=None, num_workers=num_processes))

        return read

    return {
        "np.memmap": lambda starts: map(mapped.read, starts),
        "Tokens": ours,
        "DataLoader": loader(0),
        "DataLoader, 2 workers": loader(2),
    }


def drop_from_cache(paths: Sequence[Path]) -> None:
    """Has the kernel forget what it has of some files, as far as nothing maps it."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(read: Read, starts: Sequence[int]) -> float:
    """How long it takes to read windows."""
    began = time.perf_counter()
    for window in read(starts):
        window[0].item()
    return time.perf_counter() - began


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    for name, usual in (
        ("files", 1000),
        ("megabytes", 512),
        ("seq", 2048),
        ("windows", 4000),
        ("repeats", 7),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _measure(given, Path(folder))


def _measure(given: Any, folder: Path) -> None:
    generator = np.random.default_rng(0)
    per_file = given.megabytes * 1_000_000 // WIDTH // given.files
    parts = [folder / f"{number:05}.bin" for number in range(given.files)]
    for part in parts:
        part.write_bytes(generator.integers(0, 50_000, per_file, dtype=np.uint16).tobytes())
    os.sync()
    source = {"source": f"{folder}/*.bin", "tokenizer": None, "cache_dir": f"{folder}/cache"}
    data = make_config(data=source).data
    open_tokens(data, "data.source", "runs")
    opening = []
    for _ in range(given.repeats):
        began = time.perf_counter()
        tokens = open_tokens(data, "data.source", "runs")
        opening.append(time.perf_counter() - began)
    length, taken = given.seq + 1, dict[tuple[str, str], list[float]]()
    names = readers(tokens, parts, per_file, length)
    for _ in range(given.repeats):
        numbers = generator.integers(0, given.files, given.windows)
        starts = (numbers * per_file + generator.integers(0, per_file - length, given.windows)).tolist()
        for name in names:
            gc.collect()  # a file that is mapped would stay in the cache
            drop_from_cache(parts)
            read = readers(open_tokens(data, "data.source", "runs"), parts, per_file, length)[name]
            for cache in ("cold", "warm"):
                taken.setdefault((name, cache), []).append(seconds(read, starts))
    size = given.windows * length * WIDTH / 1e6
    print(f"{cpu_model()}; {given.files} files of {per_file * WIDTH / 1e6:.3g} MB, windows of {given.seq}")
    print(f"opening: {statistics.median(opening):.3f} s")
    for cache in ("cold", "warm"):
        base = statistics.median(taken["np.memmap", cache])
        for (name, of), all_s in taken.items():
            if of == cache:
                median = statistics.median(all_s)
                spread = f"{size / max(all_s):.0f} to {size / min(all_s):.0f}"
                print(f"{cache}  {name:24}{size / median:8.0f} MB/s ({spread})  {base / median:.2f}")


if __name__ == "__main__":
    main()
