"""Text files become one token file: found, hashed, written once, and never seen half written."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import LauncherError
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.data.tokens import open_tokens
from launcher.runtime.tokens import prepare, shards
from tests.helpers.contexts import make_config, make_context
from tests.helpers.plans import staged_plan


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "a text; it's here"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.md").write_bytes(b"second")
    (folder / "a.md").write_bytes(b"first\xff")
    (folder / "deep" / "c.md").write_bytes(b"third")
    return folder


def opened(source: str, cache: Path) -> bytes:
    """The tokens of a text, one per byte."""
    config = make_config(data={"source": source, "cache_dir": str(cache)})
    tokens = open_tokens(config.data, "data.source", config.run.root)
    return bytes(tokens.read(0, len(tokens)).tolist())


def test_tokens_are_the_bytes_of_all_files_in_order(text: Path, tmp_path: Path) -> None:
    found = opened(f"{text}/**/*.md", tmp_path / "cache")
    assert found == b"first\xffsecondthird"


def test_the_token_file_is_made_once_and_follows_the_content(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    make = shards.make_shard

    def noting(data: Any, setting: str, folder: Path, shard: Any) -> Any:
        written.append(folder / f"{shard.name}.bin")
        return make(data, setting, folder, shard)

    monkeypatch.setattr(prepare, "make_shard", noting)
    for _ in range(2):
        opened(f"{text}/*.md", tmp_path / "cache")
    assert len(written) == 1
    (text / "b.md").write_bytes(b"SECOND")
    assert opened(f"{text}/*.md", tmp_path / "cache") == b"first\xffSECOND"
    assert token_files(tmp_path / "cache") == sorted(set(written))


def token_files(cache: Path) -> list[Path]:
    return sorted(cache.glob(".tokens-*/*.bin"))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda content: content[:-3],
    "with another byte in its tokens": lambda content: content[:-1] + b"?",
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_token_file_is_passed_over_and_made_again(
    text: Path, tmp_path: Path, change: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = made(text, tmp_path)
    path.write_bytes(change(path.read_bytes()))
    assert opened(f"{text}/*.md", tmp_path / "cache") == b"first\xffsecond"
    (listed,) = path.parent.glob("*.json")
    told = f"{listed} is damaged, or was not written by this user: it is passed over and made again\n"
    assert capsys.readouterr().out == told
    assert opened(f"{text}/*.md", tmp_path / "cache") == b"first\xffsecond"
    assert capsys.readouterr().out == ""


def made(text: Path, tmp_path: Path) -> list[Path]:
    opened(f"{text}/*.md", tmp_path / "cache")
    return token_files(tmp_path / "cache")


def test_only_its_user_can_read_a_token_file(text: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (path,) = made(text, tmp_path)
    finally:
        os.umask(before)
    modes = [each.stat().st_mode & 0o777 for each in (path, path.parent, path.parent / "lock")]
    assert modes == [0o600, 0o700, 0o600]


@pytest.mark.parametrize("name", ["lock", "tokens"])
def test_a_link_in_the_folder_is_never_followed(text: Path, tmp_path: Path, name: str) -> None:
    """Neither read nor truncated, though it leads to a token file that is sound."""
    (path,) = made(text, tmp_path)
    target = tmp_path / "precious"
    link = path if name == "tokens" else path.parent / "lock"
    link.replace(target) if name == "tokens" else link.unlink()
    link.symlink_to(target)
    content = target.read_bytes() if target.exists() else target.write_bytes(b"precious") and b"precious"
    if name == "lock":
        path.unlink()
        with pytest.raises(LauncherError, match=r"cannot be written in .*symbolic link.*lock"):
            opened(f"{text}/*.md", tmp_path / "cache")
    else:
        assert opened(f"{text}/*.md", tmp_path / "cache") == b"first\xffsecond"
        assert not path.is_symlink()
    assert target.read_bytes() == content


def test_a_token_file_that_others_can_write_is_made_again(text: Path, tmp_path: Path) -> None:
    (path,) = made(text, tmp_path)
    number = path.stat().st_ino
    path.chmod(0o666)
    opened(f"{text}/*.md", tmp_path / "cache")
    assert path.stat().st_ino != number
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_in_which_others_can_write_is_refused(text: Path, tmp_path: Path) -> None:
    (path,) = made(text, tmp_path)
    path.parent.chmod(0o777)
    with pytest.raises(
        LauncherError, match=r"not a folder in which this user alone can write\. Set data\.cache"
    ):
        opened(f"{text}/*.md", tmp_path / "cache")


def test_tokens_are_kept_below_the_root_of_the_runs_unless_a_folder_is_named(tmp_path: Path) -> None:
    for number, cache_dir in enumerate((None, str(tmp_path / "named"))):
        text, root = tmp_path / f"{number}.txt", tmp_path / f"runs-{number}"
        text.write_bytes(b"a text " * 400)
        data = {"source": str(text), "cache_dir": cache_dir}
        Loader(make_context(staged_plan(make_config(data=data, run={"root": str(root)}))))
        assert len(token_files(tmp_path / "named" if cache_dir else root)) == 1


def test_processes_that_race_all_see_the_whole_file(tmp_path: Path) -> None:
    source = tmp_path / "text"
    source.write_bytes(bytes(range(1, 256)) * 4096)
    fork = multiprocessing.get_context("fork")
    with fork.Pool(4) as pool:
        sizes = pool.starmap(_size, [(str(source), tmp_path / "cache")] * 8, chunksize=1)
    assert sizes == [255 * 4096] * 8
    assert len(token_files(tmp_path / "cache")) == 1


def _size(source: str, cache: Path) -> int:
    return len(opened(source, cache))


def test_a_cache_that_cannot_be_written_names_the_setting(text: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(LauncherError, match=r"cannot be written in .*Set data\.cache_dir to a folder"):
        opened(f"{text}/*.md", blocked / "cache")


def test_a_failed_write_leaves_nothing_behind(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LauncherError, match="no space left"):
        opened(f"{text}/*.md", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").glob(".tokens-*/*")] == ["lock"]
