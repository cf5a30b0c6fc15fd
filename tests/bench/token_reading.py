"""How fast samples are read from token files, beside a bare np.memmap and torch's DataLoader, in one run.

    python -m tests.bench.token_reading [--files 1000] [--megabytes 512] [--seq 2048] [--repeats 7]

One process reads windows of ids of 2 bytes at random places, as int64 tensors: by `Tokens` from many files;
by np.memmap from one file with the same ids; and by a DataLoader, in this process and with two workers, whose
dataset is that memmap. In each repeat every reader takes the same windows, in turn, once after the kernel was
told to drop the files from its cache (cold) and once again (warm). Printed are the medians in MB of ids per
second, each as a share of np.memmap's, and the seconds that opening the files takes.
"""

from __future__ import annotations

import argparse
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
    """Windows of a memmap, as a user would write them."""

    def __init__(self, path: Path, starts: Sequence[int], length: int) -> None:
        self._ids = np.memmap(path, np.uint16, "r")
        self._starts, self._length = starts, length

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self._starts[index]
        return torch.from_numpy(self._ids[start : start + self._length].astype(np.int64))


def readers(tokens: Tokens, path: Path, length: int) -> dict[str, Read]:
    """Every reader by its name."""
    mapped = np.memmap(path, np.uint16, "r")

    def ours(starts: Sequence[int]) -> Iterator[Tensor]:
        return (torch.from_numpy(tokens.read(start, length)) for start in starts)

    def memmap(starts: Sequence[int]) -> Iterator[Tensor]:
        return (torch.from_numpy(mapped[start : start + length].astype(np.int64)) for start in starts)

    def loader(workers: int) -> Read:
        return lambda starts: iter(
            DataLoader(Windows(path, starts, length), batch_size=None, num_workers=workers)
        )

    return {
        "np.memmap": memmap,
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
    whole = folder / "whole"
    with whole.open("wb") as out:
        for part in parts:
            content = generator.integers(0, 50_000, per_file, dtype=np.uint16).tobytes()
            part.write_bytes(content)
            out.write(content)
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
    for _ in range(given.repeats):
        starts = generator.integers(0, len(tokens) - length, given.windows).tolist()
        for name in readers(tokens, whole, length):
            for cache in ("cold", "warm"):
                if cache == "cold":
                    drop_from_cache([*parts, whole])
                    tokens = open_tokens(data, "data.source", "runs")
                read = readers(tokens, whole, length)[name]
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
