"""Text files become one token file: found, hashed, written once, and never seen half written."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.base.errors import LauncherError
from launcher.runtime.data import tokens
from launcher.runtime.data.tokens import open_tokens


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "a text; it's here"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.md").write_bytes(b"second")
    (folder / "a.md").write_bytes(b"first\xff")
    (folder / "deep" / "c.md").write_bytes(b"third")
    return folder


def test_tokens_are_the_bytes_of_all_files_in_order(text: Path, tmp_path: Path) -> None:
    opened = open_tokens(f"{text}/**/*.md", tmp_path / "cache")
    assert opened.tobytes() == b"first\xffsecondthird"
    assert opened.dtype == np.uint8
    assert isinstance(opened, np.memmap)


def test_the_token_file_is_made_once_and_follows_the_content(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = tokens._write

    def noting(files: Any, path: Path) -> None:
        written.append(path)
        write(files, path)

    monkeypatch.setattr(tokens, "_write", noting)
    for _ in range(2):
        open_tokens(f"{text}/*.md", tmp_path / "cache")
    assert len(written) == 1
    (text / "b.md").write_bytes(b"SECOND")
    assert open_tokens(f"{text}/*.md", tmp_path / "cache").tobytes() == b"first\xffSECOND"
    assert sorted(token_files(tmp_path / "cache")) == sorted(set(written))


def test_a_token_file_cut_short_is_made_again(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    open_tokens(f"{text}/*.md", cache)
    (path,) = token_files(cache)
    path.write_bytes(b"fir")
    assert open_tokens(f"{text}/*.md", cache).tobytes() == b"first\xffsecond"


def token_files(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.name != "lock"]


def test_processes_that_race_all_see_the_whole_file(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.write_bytes(bytes(range(1, 256)) * 4096)
    fork = multiprocessing.get_context("fork")
    with fork.Pool(4) as pool:
        sizes = pool.starmap(_size, [(str(source), tmp_path / "cache")] * 8, chunksize=1)
    assert sizes == [255 * 4096] * 8
    assert len(token_files(tmp_path / "cache")) == 1


def _size(source: str, cache: Path) -> int:
    return len(open_tokens(source, cache))


def test_a_cache_that_cannot_be_written_names_the_setting(text: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(LauncherError, match=r"cannot be written: .*Set data\.cache_dir to a folder"):
        open_tokens(f"{text}/*.md", blocked / "cache")


def test_a_failed_write_leaves_nothing_behind(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LauncherError, match="no space left"):
        open_tokens(f"{text}/*.md", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]
