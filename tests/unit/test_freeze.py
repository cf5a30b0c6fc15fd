import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from launcher.base.errors import JobError
from launcher.runs import freeze as freezing
from launcher.runs.freeze import freeze, frozen_plan


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Stands in for the packages of this program, which are many files."""
    package = tmp_path / "launcher"
    (package / "_data").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_data" / "a.yaml").write_text("a: 1\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_text("")
    monkeypatch.setattr(freezing, "own_packages", lambda: ["launcher"])
    monkeypatch.setattr(freezing, "package_folder", lambda name: package)
    return package


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def work_tree(tmp_path):
    """A git work tree with a file of every kind."""
    root = tmp_path / "tree"
    (root / "mine").mkdir(parents=True)
    git(root, "init", "--quiet")
    for name in ("mine/model.py", "words.txt", "gone.py"):
        (root / name).write_text("committed\n")
    (root / ".gitignore").write_text("*.log\nsecret/\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    (root / "gone.py").unlink()
    (root / "mine" / "model.py").write_text("changed\n")
    (root / "new.py").write_text("new\n")
    (root / "table.csv").write_text("1,2\n")
    (root / ".env").write_text("TOKEN=x\n")
    (root / "a.log").write_text("ignored\n")
    (root / "secret").mkdir()
    (root / "secret" / "key.py").write_text("ignored\n")
    return root


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_tracked_files_are_copied_as_they_are_and_untracked_python_with_them(own, work_tree, run_dir):
    copied = freeze([str(work_tree)], run_dir)
    frozen = run_dir / "source" / "roots" / "0"
    assert names(frozen) == [".gitignore", "mine/model.py", "new.py", "words.txt"]
    assert (frozen / "mine" / "model.py").read_text() == "changed\n"
    assert copied == (str(work_tree / "new.py"),)


def test_other_untracked_files_are_copied_when_they_are_listed_and_ignored_ones_never(
    own, work_tree, run_dir
):
    copied = freeze([str(work_tree)], run_dir, ["*.csv"])
    assert str(work_tree / "table.csv") in copied
    with pytest.raises(JobError, match=r"^--untracked \*\.log: no untracked file in .*tree$"):
        freeze([str(work_tree)], run_dir, ["*.log"])


def test_the_copies_are_read_only(own, work_tree, run_dir):
    freeze([str(work_tree)], run_dir)
    files = [path for path in (run_dir / "source").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o222 for path in files} == {0}


def test_a_link_is_copied_as_a_link_and_never_what_it_points_to(own, work_tree, run_dir):
    (work_tree / "outside").symlink_to("/etc/hostname")
    git(work_tree, "add", "outside")
    freeze([str(work_tree)], run_dir)
    assert (run_dir / "source" / "roots" / "0" / "outside").is_symlink()


def test_outside_of_git_only_python_files_are_taken(own, run_dir, tmp_path):
    root = tmp_path / "plain"
    for name in ("a.py", "inner/b.py", "notes.txt", ".hidden/c.py", "venv/lib/site-packages/d.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    assert freeze([str(root)], run_dir) == ()
    assert names(run_dir / "source" / "roots" / "0") == ["a.py", "inner/b.py"]


def test_of_an_installed_package_everything_is_taken_but_compiled_files(own, run_dir):
    freeze([], run_dir)
    assert names(run_dir / "source" / "lib" / "launcher") == ["__init__.py", "_data/a.yaml"]


def test_earlier_runs_are_never_copied_and_a_file_named_like_one_of_theirs_is(own, work_tree, run_dir):
    for run in ("runs/one", "two"):
        for name in ("job.json", "plan.json", "logs/rank-0.log", "source/roots/0/model.py"):
            (work_tree / run / name).parent.mkdir(parents=True, exist_ok=True)
            (work_tree / run / name).write_text("of a run\n")
    (work_tree / "runs" / "sweep" / "source" / "lib").mkdir(parents=True)
    for name in ("sweep.json", "source/lib/a.py", "0-x/job.json", "0-x/plan.json"):
        (work_tree / "runs" / "sweep" / name).parent.mkdir(parents=True, exist_ok=True)
        (work_tree / "runs" / "sweep" / name).write_text("of a sweep\n")
    (work_tree / "mine" / "job.json").write_text("{}")
    (work_tree / "runs" / "tool.py").write_text("")
    git(work_tree, "add", ".")
    freeze([str(work_tree)], run_dir)
    copied = names(run_dir / "source" / "roots" / "0")
    assert [name for name in copied if "runs" in name or "two" in name] == ["runs/tool.py"]
    assert "mine/job.json" in copied


def test_a_file_with_a_secret_is_not_copied(own, work_tree, run_dir):
    (work_tree / "mine" / "model.py").write_text("token = 'canary-0123456789'\n")
    with pytest.raises(JobError, match=r"mine/model\.py would hold the value of HF_TOKEN"):
        freeze([str(work_tree)], run_dir, (), {"HF_TOKEN": b"canary-0123456789"})
    assert "mine/model.py" not in names(run_dir / "source" / "roots" / "0")
    assert "canary" in (work_tree / "mine" / "model.py").read_text()


def test_a_folder_of_data_is_refused(own, work_tree, run_dir, monkeypatch):
    monkeypatch.setattr(freezing, "_MAX_BYTES", 400_000)
    (work_tree / "words.txt").write_text("x" * 400_000)
    with pytest.raises(
        JobError, match=r"tree holds more than 400 KB of files, which is not code\. Keep data out"
    ):
        freeze([str(work_tree)], run_dir)


def test_the_code_of_an_earlier_start_is_moved_aside(own, run_dir):
    freeze([], run_dir)
    freeze([], run_dir)
    assert len(list(run_dir.glob("source.*"))) == 1


def test_the_frozen_program_is_imported_with_its_plugins_and_not_the_working_tree(run_dir):
    freeze([], run_dir)
    code = (
        "import launcher, launcher_plugins\n"
        "from launcher.base import registry, resources\n"
        "from launcher.contract.executor import Executor\n"
        "from importlib.metadata import distribution\n"
        "print(launcher.__file__, launcher_plugins.__file__, resources.folder('conf'))\n"
        "print(distribution('trireme-launcher').locate_file(''))\n"
        "registry.load(Executor, 'slurm')\n"
    )
    environment = {"PYTHONPATH": str(run_dir / "source" / "lib"), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert all(Path(word).is_relative_to(run_dir) for word in done.stdout.split())


def test_a_frozen_plan_names_the_copies(make_plan, run_dir):
    from dataclasses import replace

    plan = replace(make_plan(), source_roots=("/home/a", "/home/b"))
    assert frozen_plan(plan, run_dir).source_roots == (
        f"{run_dir}/source/roots/0",
        f"{run_dir}/source/roots/1",
    )


def test_a_program_that_is_found_in_the_tree_it_was_installed_from_is_frozen_with_its_name(
    own, run_dir, tmp_path, monkeypatch
):
    folder = tmp_path / "tree" / "trireme_launcher.egg-info"
    folder.mkdir(parents=True)
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: trireme-launcher\nVersion: 7.7\n")
    (folder / "entry_points.txt").write_text("[launcher.schedules]\nmine = a:B\n")
    monkeypatch.syspath_prepend(folder.parent)
    freeze((), run_dir)
    (frozen,) = run_dir.glob("source/lib/*.dist-info")
    found = PathDistribution(frozen)
    assert (found.name, found.version) == ("trireme-launcher", "7.7")
    assert [point.name for point in found.entry_points] == ["mine"]
