"""A schedule from a distribution of its own: installed, listed, loaded, conforming."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent / "example_schedule"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed distribution, beside its tests."""
    folder = tmp_path_factory.mktemp("example")
    source = shutil.copytree(EXAMPLE, folder / "source")
    site = folder / "site"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    shutil.copy(source / "test_eager_1f1b.py", folder)
    return folder


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_example_is_listed_with_its_own_distribution(installed: Path) -> None:
    program = (
        "from launcher.base.registry import record; "
        "print(record('launcher.schedules', 'eager_1f1b').distribution)"
    )
    assert run_python(installed, "-c", program).stdout.strip() == "trireme-example-schedule"


def test_example_passes_its_own_tests(installed: Path) -> None:
    ended = run_python(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_eager_1f1b.py")
    assert ended.returncode == 0, ended.stdout


def test_example_is_unknown_where_it_is_not_installed(tmp_path: Path) -> None:
    ended = run_python(
        tmp_path,
        "-c",
        "from launcher.base.registry import record; record('launcher.schedules', 'eager_1f1b')",
    )
    assert (
        "no plugin 'eager_1f1b' in launcher.schedules. Known: 1f1b, gpipe, interleaved_1f1b, naive, zb_h1"
        in ended.stderr
    )
