"""The wheel holds the tree, the whole tree and nothing else, and works from anywhere."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = (
    ("launcher", "launcher", "**/*.py"),
    ("plugins/launcher_plugins", "launcher_plugins", "**/*.py"),
    ("conf", "launcher/_data/conf", "**/*.yaml"),
    ("recipes", "launcher/_data/recipes", "*.yaml"),
    ("slurm", "launcher/_data/slurm", "cluster"),
    ("slurm", "launcher/_data/slurm", "*.sh"),
    (".", "launcher/_data/docs", "README.md"),
    (".", "launcher/_data/docs", "[!.]*/README.md"),
)
"""Folders of the tree, the place of each in the wheel, and what ships of it."""
BUILD_INPUTS = (
    *("pyproject.toml", "README.md", "LICENSE", "launcher", "plugins", "conf", "recipes", "slurm"),
    "tests/README.md",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from an sdist that is built from a copy, so that no build folder is left in the tree."""
    copy = tmp_path_factory.mktemp("copy")
    for name in BUILD_INPUTS:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            (copy / name).parent.mkdir(exist_ok=True)
            shutil.copy(source, copy / name)
    dist = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The command of an environment that holds the wheel, and the dependencies of this one."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    site_packages = sysconfig.get_paths()["purelib"]
    target = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
    # Folders named in a .pth file get no .pth processing of their own, so an editable install
    # of the tree in the outer environment stays out.
    Path(target, "dependencies.pth").write_text(site_packages + "\n")
    return venv / "bin" / "trireme"


def command(installed, *words):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [installed, *words], cwd="/", env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_exactly_the_files_of_the_tree(wheel):
    expected = {
        f"{place}/{path.relative_to(REPOSITORY / folder)}"
        for folder, place, pattern in SHIPPED
        for path in (REPOSITORY / folder).glob(pattern)
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert sorted(found - expected) == []
    assert sorted(expected - found) == []


def test_the_license_ships(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
        assert b"The Trireme authors" in archive.read(name)


def test_an_installed_wheel_plans_from_the_root_folder(installed):
    done = command(installed, "plan", "quickstart")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 ranks" in done.stdout


def test_an_installed_wheel_is_not_the_tree(installed):
    code = "import launcher, launcher_plugins; print(launcher.__file__, launcher_plugins.__file__)"
    python = installed.with_name("python")
    done = subprocess.run([python, "-P", "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert str(REPOSITORY) not in done.stdout


def test_an_installed_wheel_lists_the_shipped_recipes(installed):
    done = command(installed, "recipe", "ls")
    assert done.returncode == 0
    assert all(path.stem in done.stdout for path in (REPOSITORY / "recipes").glob("*.yaml"))


@pytest.mark.parametrize(
    ("words", "page"),
    [("help readme", "README.md"), ("help slurm", "slurm/README.md"), ("help tests", "tests/README.md")],
)
def test_an_installed_wheel_shows_the_pages(installed, words, page):
    done = command(installed, *words.split())
    title = (REPOSITORY / page).read_text().splitlines()[0].removeprefix("# ")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, title)
