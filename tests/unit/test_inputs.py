"""Digests of what a run depends on beside its settings, and what is said of those that changed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.contract.inputs.record import (
    INPUTS,
    Inputs,
    read_inputs,
    refusal,
    resume_command,
    write_inputs,
)
from launcher.contract.inputs.text import blocks_per_file, file_digests
from launcher.contract.inputs.user_code import code_digests, code_files
from launcher.contract.site import SiteConfig
from launcher.runs.resume import changed_inputs
from tests.helpers.configs import launch_config, with_settings
from tests.helpers.plans import bare_plan

# Text

KIB = 1024


def changed(folder: Path, num_blocks: int, edit) -> list[str]:
    """The files whose digests an edit changes."""
    files = sorted(folder.iterdir())
    before = file_digests(files, num_blocks)
    edit()
    after = file_digests(files, num_blocks)
    return [name for name in after if before[name] != after[name]]


def overwrite(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"!")


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_bytes(bytes(range(250)) * 4 * KIB)
    return folder


@pytest.mark.parametrize("at", [0, 300 * KIB + 7, 1000 * KIB - 1])
def test_one_other_byte_is_found_in_the_file_that_has_it(texts, at):
    assert changed(texts, 4, lambda: overwrite(texts / "b.txt", at)) == ["b.txt"]


def test_a_file_in_another_order_is_found(texts):
    path = texts / "a.txt"
    assert changed(texts, 4, lambda: path.write_bytes(path.read_bytes()[::-1])) == ["a.txt"]


@pytest.mark.parametrize(("at", "is_found"), [(0, True), (700 * KIB, False), (1000 * KIB - 1, True)])
def test_of_a_file_beyond_its_blocks_those_are_read_and_not_what_is_between(texts, at, is_found):
    assert changed(texts, 2, lambda: overwrite(texts / "a.txt", at)) == ["a.txt"] * is_found


def test_a_file_that_grew_is_found_whatever_is_read_of_it(texts):
    path = texts / "a.txt"
    assert changed(texts, 1, lambda: path.write_bytes(path.read_bytes() + b"x")) == ["a.txt"]


def test_files_are_the_same_wherever_they_are(texts, tmp_path, monkeypatch):
    before = file_digests(sorted(texts.iterdir()), 4)
    copy = shutil.copytree(texts, tmp_path / "copy")
    monkeypatch.chdir(copy)
    assert file_digests([Path("a.txt"), Path("b.txt")], 4) == before


def test_the_blocks_are_shared_by_the_files():
    assert [blocks_per_file([Path()] * count) for count in (1, 4, 1000)] == [256, 64, 1]


# Code


@pytest.fixture
def lab(tmp_path):
    """A user's folder: a model, what it imports in every way there is, and what it does not."""
    files = {
        "model.py": "import json, helpers\ndef build():\n    from lab import parts, loss as l\n",
        "helpers.py": "import launcher.base\nif False:\n    import late.module\n",
        "late/module.py": "",
        "lab/__init__.py": "",
        "lab/parts.py": "from . import blocks\nfrom .deep.er import x\nfrom ..above import y\n",
        "lab/blocks.py": "from lab import parts\n",
        "lab/deep/er.py": "",
        "lab/loss.py": "def broken(:\n",
        "lab/unused.py": "",
        "launcher/base.py": "",
        "json.txt": "",
    }
    for name, text in files.items():
        (tmp_path / "lab" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lab" / name).write_text(text)
    return tmp_path / "lab"


LAB = {
    "model.py",
    "helpers.py",
    "late/module.py",
    "lab/__init__.py",
    "lab/parts.py",
    "lab/blocks.py",
    "lab/deep/er.py",
    "lab/loss.py",
}


def config_of(model="model:build", data=None):
    return with_settings(
        launch_config(), {"model": {"target": model}, "data": {"target": data, "source": None}}
    )


def test_the_code_is_what_the_targets_are_in_and_what_that_imports_beside_it(lab, tmp_path):
    assert code_files(config_of(), [str(tmp_path), str(lab)], with_installed=True) == {
        name: lab / name for name in sorted(LAB)
    }


def test_without_targets_there_is_no_code(lab):
    assert code_files(config_of(None), [str(lab)], with_installed=True) == {}


def test_a_copy_of_the_code_has_the_digests_of_the_code(lab, tmp_path):
    copy = shutil.copytree(lab, tmp_path / "run" / "source" / "roots" / "0")
    digests = code_digests(config_of(), [str(lab)], with_installed=True)
    assert code_digests(config_of(), [str(copy)], with_installed=True) == digests
    (copy / "lab" / "blocks.py").write_text("# tripled\n")
    other = code_digests(config_of(), [str(copy)], with_installed=True)
    assert [name for name in digests if digests[name] != other[name]] == ["lab/blocks.py"]


@pytest.mark.parametrize(
    ("place", "expected"),
    [("src", {"mine/__init__.py", "mine/nets.py", "beside.py"}), ("site-packages", {"mine/__init__.py"})],
)
def test_of_what_is_installed_only_the_users_own_folder_is_followed(place, expected, tmp_path, monkeypatch):
    folder = tmp_path / place
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "__init__.py").write_text("from .nets import build\n")
    (folder / "mine" / "nets.py").write_text("import beside\n")
    (folder / "beside.py").write_text("")
    monkeypatch.syspath_prepend(folder)
    assert set(code_files(config_of(data="mine:Data"), [], with_installed=True)) == expected
    assert code_files(config_of(data="mine:Data"), [], with_installed=False) == {}


# What is said


def test_every_kind_of_change_is_told_with_both_digests():
    old = Inputs(data={"a": "7 bytes, " + "0a" * 32, "b": "1"}, code={"m.py": "1f" * 32}, num_blocks=1)
    new = Inputs(data={"a": "7 bytes, " + "0b" * 32, "c": "2"}, code={"m.py": "1f" * 32}, num_blocks=1)
    assert old.changes(old) == []
    assert old.changes(new) == [
        "data a (7 bytes, 0a0a0a0a0a0a -> 7 bytes, 0b0b0b0b0b0b)",
        "data b (1 -> missing)",
        "data c (missing -> 2)",
    ]


def test_of_many_changes_the_first_are_named():
    fault = refusal("mine", [f"data {number}" for number in range(7)], "trireme run x")
    assert str(fault) == (
        "run.dir=mine: cannot resume: 7 inputs changed since it was started: data 0, data 1, data 2, data 3, "
        "data 4, and 2 more. Put back what it was started with, or go on all the same: trireme run x"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"data": 3}'])
def test_a_damaged_record_is_none(text, tmp_path):
    (tmp_path / INPUTS).write_text(text)
    assert read_inputs(tmp_path) is None


ACCEPTED = "--resume --accept-changed-inputs"


def test_the_command_is_that_of_the_run_as_it_was_typed_in_its_own_directory(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    job = {"recipe": "my lab/x.yaml", "overrides": ["a='b;c'", "run.dir=of/its/parent"]}
    (run / "job.json").write_text(json.dumps(job))
    words = """'my lab/x.yaml' 'a='"'"'b;c'"'"''"""
    assert resume_command(run) == f"trireme run {words} run.dir={run} {ACCEPTED}"
    (run / "job.json").write_text(json.dumps(job | {"overrides": ["a=1"]}))
    assert resume_command(run) == f"trireme run 'my lab/x.yaml' a=1 run.dir={run} {ACCEPTED}"
    (run / "source").mkdir()
    assert resume_command(run).startswith("trireme submit ")
    (tmp_path / "sweep.json").write_text("{}")
    assert resume_command(run) == f"trireme sweep retry {tmp_path} --accept-changed-inputs"


# What the launcher sees


def plan_of(source, **site):
    return bare_plan(
        replace(with_settings(launch_config(), {"data": {"source": str(source)}}), site=SiteConfig(**site))
    )


@pytest.fixture
def started(texts, tmp_path):
    """A run that was started with two texts."""
    files = sorted(texts.iterdir())
    write_inputs(tmp_path, Inputs(data=file_digests(files, 128), code={}, num_blocks=128))
    return tmp_path


def test_the_launcher_finds_what_the_ranks_would_find(started, texts):
    plan = plan_of(texts / "*")
    assert changed_inputs(plan, started) == []
    (texts / "b.txt").unlink()
    (change,) = changed_inputs(plan, started)
    assert change.startswith("data b.txt (1024000 bytes, ")
    assert change.endswith(" -> missing)")


def test_what_a_container_holds_is_left_to_the_ranks(started, texts):
    (texts / "b.txt").unlink()
    assert changed_inputs(plan_of(texts / "*", container_image="/x.sqsh"), started) == []
    assert changed_inputs(plan_of("package:none", python="/opt/python"), started) == []


def test_installed_code_is_left_to_the_ranks_where_they_have_another_python(lab, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(lab)
    plan = replace(bare_plan(config_of()), source_roots=())
    digests = code_digests(plan.config, [], with_installed=True)
    write_inputs(tmp_path, Inputs(data={}, code=digests, num_blocks=1))
    (lab / "model.py").write_text("")
    elsewhere = replace(plan, config=replace(plan.config, site=SiteConfig(python="/opt/python")))
    assert changed_inputs(elsewhere, tmp_path) == []
    (change,) = changed_inputs(plan, tmp_path)
    assert change.startswith("code model.py (")


def test_a_run_without_a_record_has_nothing_to_compare(texts, tmp_path):
    assert changed_inputs(plan_of(texts / "*"), tmp_path) == []
