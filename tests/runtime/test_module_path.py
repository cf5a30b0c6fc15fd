"""A user's folders come after the standard library and what is installed: a file there that has the name of
another module is never run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.app.planning import make_plan
from launcher.app.user_model import refuse_shadowed
from launcher.base.errors import ConfigError
from launcher.config.compose import compose
from launcher.config.load import load
from launcher.contract.job import CODE, FROZEN_ROOTS, START_FILE
from launcher.runs.freeze import freeze

PLANTED = ("colorsys", "yaml", "launcher_plugins")
"""Modules of Python, of a package, and of one that is installed in editable form where this is a checkout."""
PROGRAM = """
import json, sys
from importlib import import_module
from launcher.runtime.process.module_path import add_source_roots
roots, names = json.loads(sys.argv[1])
{add}
print(json.dumps([import_module(name).__file__ for name in names]))
"""
ADD = "add_source_roots(roots)"
SABOTAGED = "sys.path[:0] = roots"
MODEL = """
import torch
from types import SimpleNamespace

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.ones(4), index % 2

def build():
    return SimpleNamespace(layers=[torch.nn.Linear(4, 2)], loss=lambda x, y:
                           torch.nn.functional.cross_entropy(x, y, reduction="sum"))
"""
RECIPE = """
defaults: [/base, override /model: custom, override /data: custom, _self_]
model: {target: "my_model:build"}
data: {target: "my_model:Samples", eval_fraction: 0.0, prefetch_batches: 0}
batch: {global_size: 4, micro_size: 2, seq_length: 1}
train: {num_steps: 2}
parallel: {dp: 2}
report: {baseline: none, warmup_steps: 1}
"""


def plant(folder: Path, names: tuple[str, ...] = PLANTED) -> Path:
    """Files that leave a mark when they are run."""
    mark = folder.parent / f"ran-in-{folder.name}"
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ')\n")
    return mark


def imported(add: str, roots: list[Path], names: tuple[str, ...], path: tuple[str, ...] = ()) -> list[Path]:
    """The files that modules are imported from, in a process of its own."""
    code = f"import sys\nsys.path += {list(path)!r}\n{PROGRAM.format(add=add)}"
    words = [sys.executable, "-P", "-c", code, json.dumps([[str(root) for root in roots], names])]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [Path(name) for name in json.loads(done.stdout)]


def test_a_planted_module_is_not_imported_and_the_users_own_is(tmp_path):
    folder = tmp_path / "a:b; it's"
    folder.mkdir()
    mark = plant(folder)
    (folder / "mine.py").touch()
    *others, mine = imported(ADD, [folder], (*PLANTED, "mine"))
    assert mine == folder / "mine.py"
    assert not any(other.is_relative_to(folder) for other in others)
    assert not mark.exists()


def test_a_planted_module_would_be_found_if_the_folder_came_first(tmp_path):
    mark = plant(tmp_path)
    imported(SABOTAGED, [tmp_path], PLANTED)
    assert mark.read_text() == "colorsys yaml launcher_plugins "


@pytest.fixture
def frozen(tmp_path: Path) -> tuple[Path, Path]:
    """A live folder, and a frozen copy of it."""
    live, copy = tmp_path / "live", tmp_path / FROZEN_ROOTS / "0"
    for folder in (live, copy):
        folder.mkdir(parents=True)
        (folder / "mine.py").touch()
        plant(folder, ("random", "yaml"))
    return live, copy


def test_a_frozen_copy_comes_before_the_folder_that_is_installed_in_editable_form(frozen):
    live, copy = frozen
    assert imported(ADD, [copy], ("mine",), path=(str(live),)) == [copy / "mine.py"]
    assert imported("sys.path += roots", [copy], ("mine",), path=(str(live),)) == [live / "mine.py"]


def test_a_frozen_copy_comes_after_the_standard_library_and_what_is_installed(frozen):
    _, copy = frozen
    assert not any(path.is_relative_to(copy) for path in imported(ADD, [copy], ("random", "yaml")))


def test_a_process_that_is_spawned_finds_the_users_modules(tmp_path):
    (tmp_path / "mine.py").write_text("def add(number):\n    return number + 1\n")
    spawn = f"{ADD}\nimport mine, multiprocessing\n"
    spawn += "print(multiprocessing.get_context('spawn').Pool(1).map(mine.add, [1]), file=sys.stderr)\n"
    words = [sys.executable, "-P", "-c", PROGRAM.format(add=spawn), json.dumps([[str(tmp_path)], []])]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "[2]\n"


# Processes that are started


def started(
    words: list[str], folder: Path, variables: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    return subprocess.run(
        words, cwd=folder, env=environment | dict(variables), capture_output=True, text=True, check=False
    )


def test_the_launcher_imports_nothing_from_the_current_folder(tmp_path):
    mark = plant(tmp_path, ("random", *PLANTED))
    done = started([sys.executable, "-m", "launcher", "plan", "quickstart"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert not mark.exists()
    # While python -m looks there first.
    started([sys.executable, "-m", "calendar"], tmp_path)
    started([sys.executable, "-m", "random"], tmp_path)
    assert mark.read_text() == "random "


def test_a_run_of_a_users_own_model_imports_no_planted_module_anywhere(tmp_path):
    """The launcher, the process that measures the model, torchrun, and ranks, in a folder with a colon."""
    folder, here = tmp_path / "recipes: a", tmp_path / "here: b"
    for each in (folder, here):
        each.mkdir()
    marks = [plant(each, (*PLANTED, "random", "json", "numpy")) for each in (folder, here)]
    (folder / "my_model.py").write_text(MODEL)
    (folder / "own.yaml").write_text(RECIPE)
    done = started([sys.executable, "-m", "launcher", "run", str(folder / "own.yaml"), "run.dir=run"], here)
    assert done.returncode == 0, done.stderr
    assert not any(mark.exists() for mark in marks)


def test_a_frozen_program_starts_from_a_path_with_a_colon_and_not_from_the_current_folder(tmp_path):
    run_dir, here = tmp_path / "runs: it's", tmp_path / "here"
    run_dir.mkdir()
    here.mkdir()
    mark = plant(here, (*PLANTED, "random", "launcher"))
    freeze([], run_dir)
    (run_dir / CODE / "tells.py").write_text(
        "import random, sys, launcher, launcher_plugins\n"
        "print(launcher.__file__, launcher_plugins.__file__, __name__, *sys.argv[1:], sep='|')\n"
    )
    words = [sys.executable, str(run_dir / CODE / START_FILE), "tells", "--x", "a b"]
    told = started(words, here, {"PYTHONSAFEPATH": "1"}).stdout.strip().split("|")
    assert [str(Path(name).parent) for name in told[:2]] == [
        f"{run_dir}/{CODE}/{name}" for name in ("launcher", "launcher_plugins")
    ]
    assert told[2:] == ["__main__", "--x", "a b"]
    assert not mark.exists()


# Refused when it is planned


def own_recipe(folder: Path, model: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "my_model.py").write_text(model)
    (folder / "own.yaml").write_text(RECIPE)
    return str(folder / "own.yaml")


@pytest.mark.parametrize(
    ("module", "other"),
    [("random", rf"{re.escape(os.path.dirname(os.__file__))}/random\.py"), ("time", "a module of Python")],
)
def test_a_module_with_the_name_of_one_of_python_is_refused_with_both_files(tmp_path, module, other):
    recipe = own_recipe(tmp_path / "lab", f"import {module}\n{MODEL}")
    mark = plant(tmp_path / "lab", (module,))
    own = re.escape(str(tmp_path / "lab" / f"{module}.py"))
    rule = rf"model\.target=my_model:build: it imports {module}, which is {other}, not {own}\. Rename {own}\."
    with pytest.raises(ConfigError, match=rf"^{rule} \[.*own\.yaml:3\]$"):
        make_plan(recipe, ())
    assert not mark.exists()


def test_a_target_with_the_name_of_an_installed_package_is_refused(tmp_path):
    recipe = own_recipe(tmp_path / "lab", MODEL)
    (tmp_path / "lab" / "yaml").mkdir()
    (tmp_path / "lab" / "yaml" / "__init__.py").write_text(MODEL)
    with pytest.raises(
        ConfigError, match=r"=yaml:build: it imports yaml, which is .*/yaml/__init__\.py, not "
    ):
        make_plan(recipe, ["model.target=yaml:build"])


def test_a_file_that_no_code_of_the_user_imports_is_not_refused(tmp_path):
    plant(tmp_path, ("random", *PLANTED))
    composed = compose(own_recipe(tmp_path, MODEL))
    refuse_shadowed(load(composed.values, composed.sources), [str(tmp_path)], composed.sources)
