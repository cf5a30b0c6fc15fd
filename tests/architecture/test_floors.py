"""Every module imports only its own floor and lower ones, and no cycle ties modules together."""

import ast
import graphlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

FLOORS = (
    {"base"},
    {"typed"},
    {"contract"},
    {"config", "schedule", "metrics", "bench", "runtime"},
    {"plan", "runs", "report", "testing"},
    {"app"},
    {"cli"},
)
"""The packages of the core from the bottom up: a module imports its own package and those of lower floors."""
SHARED_WITH_PLUGINS = {"base", "typed", "contract"}
COMPOSE_MODULES = {
    f"launcher.config.{name}"
    for name in ("compose", "interpolations", "override_grammar", "set_by_recipe", "yaml_files")
}
COMPOSE_LIBRARIES = {"hydra", "omegaconf", "yaml", "antlr4"}
RUNTIME_LIBRARIES = {"torch", "numpy", "safetensors", "deepspeed"}
TOKEN_LIBRARIES = {"tokenizers", "sentencepiece", "zstandard", "pyarrow"}
TESTING_LIBRARIES = {"pytest"}
MEASURES = {"runtime", "metrics", "bench"}
PREDICTS = ("launcher.plan", "launcher.schedule.simulate")
PEERS = ("torch.distributed.pipelining", "deepspeed.pipe", "deepspeed.runtime.pipe")
"""Pipeline engines that ours is measured beside, and never runs on."""


def modules() -> dict[str, Path]:
    """Every module of the two packages by its dotted name."""
    found = {}
    for root in (REPOSITORY, REPOSITORY / "plugins"):
        for package in ("launcher", "launcher_plugins"):
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def package(module: str) -> str:
    """The package of the core that a module is in; ``cli`` for what starts it."""
    return "cli" if module == "launcher.__main__" else module.split(".")[1] if "." in module else "base"


def floor(module: str) -> int:
    """The floor of a module of the core."""
    return next(floor for floor, packages in enumerate(FLOORS) if package(module) in packages)


def is_runtime_half(module: str) -> bool:
    """Whether a module of a plugin runs on the ranks."""
    return module.startswith("launcher_plugins.") and "runtime" in module.split(".")


def imports(source: str) -> Iterator[str]:
    """Every module that a source may import, in functions too; for a name its module and itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(module: str, source: str, known: set[str]) -> Iterator[str]:
    """What a module imports from above its floor, or from a library that its floor has no use for."""
    is_plugin = module.startswith("launcher_plugins")
    for name in imports(source):
        top = name.partition(".")[0]
        if name in known and top == "launcher_plugins":
            if not is_plugin or (is_runtime_half(name) and not is_runtime_half(module)):
                yield f"{module} imports {name}: plugins enter by their entry points"
        elif name in known:
            if not _may_import(module, name):
                yield f"{module} imports {name}, which is not below it"
            if not is_plugin and package(module) in MEASURES and name.startswith(PREDICTS):
                yield f"{module} imports {name}: what measures never imports what predicts"
        elif name.startswith(PEERS):
            yield f"{module} imports {name}: the pipeline is our own"
        elif top not in _libraries(module):
            yield f"{module} imports {name}: not on this floor"


def _may_import(module: str, name: str) -> bool:
    if module.startswith("launcher_plugins"):
        return package(name) in SHARED_WITH_PLUGINS or (
            is_runtime_half(module) and package(name) == "runtime"
        )
    if package(name) == package(module):
        return True
    return floor(name) < floor(module) and package(name) != "runtime"  # which is started, never imported


def _libraries(module: str) -> frozenset[str]:
    """Top-level names that a module may import beside those of its own floor."""
    always = sys.stdlib_module_names | {"launcher", "launcher_plugins"}
    if module in COMPOSE_MODULES:
        return always | COMPOSE_LIBRARIES
    if module.startswith("launcher.runtime.tokens"):
        return always | TOKEN_LIBRARIES | {"numpy"}
    if module.startswith("launcher.runtime") or is_runtime_half(module):
        return always | RUNTIME_LIBRARIES
    return always | TESTING_LIBRARIES if module.startswith("launcher.testing") else always


def _is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


@pytest.mark.parametrize("module", modules())
def test_module_imports_only_its_own_floor_and_lower_ones(module):
    assert list(faults(module, modules()[module].read_text(), set(modules()))) == []


def test_every_package_of_the_tree_is_on_one_floor():
    in_tree = sorted(path.parent.name for path in (REPOSITORY / "launcher").glob("*/__init__.py"))
    assert sorted(name for packages in FLOORS for name in packages) == in_tree
    assert [path.name for path in (REPOSITORY / "launcher").glob("[!_]*.py")] == []


def test_every_package_says_what_lives_there():
    for module, path in modules().items():
        if path.name == "__init__.py":
            tree = ast.parse(path.read_text())
            assert ast.get_docstring(tree), module
            assert len(tree.body) == 1, f"{module} holds code"


def test_no_folder_holds_more_than_fourteen_modules():
    counts = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    assert [str(folder) for folder, count in counts.items() if count > 14] == []


def test_no_import_closes_a_cycle_be_it_inside_of_a_function():
    known = modules()
    graph = {}
    for module, path in known.items():
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if not _is_for_types_only(node)]
        graph[module] = (set(imports(ast.unparse(tree))) & set(known)) - {module}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("launcher.plan.build", "from launcher.app import launch"),
        ("launcher.plan.build", "import torch"),
        ("launcher.plan.build", "def late():\n    import yaml"),
        ("launcher.schedule.passes", "from launcher.config import load"),
        ("launcher.base.errors", "from launcher.contract.config import LaunchConfig"),
        ("launcher.runtime.train.loop", "from launcher.metrics.read import read_run"),
        ("launcher.runtime.measure.memory", "from launcher.plan.cost.memory import part_bytes"),
        ("launcher.runtime.measure.clock", "from launcher.schedule import simulate"),
        ("launcher.metrics.read", "from launcher.plan.cost import timing"),
        ("launcher.cli.runs.start", "import launcher.runtime.process.main"),
        ("launcher.base.registry", "import launcher_plugins.executors.torchrun"),
        ("launcher_plugins.parallel.data.plan", "from launcher.plan import build"),
        ("launcher_plugins.parallel.data.plan", "import torch"),
        ("launcher_plugins.parallel.data.plan", "from launcher_plugins.parallel.data import runtime"),
        ("launcher.runs.store", "from rich import print"),
        ("launcher.runtime.train.pipeline_executor", "from torch.distributed import pipelining"),
        ("launcher_plugins.parallel.pipeline.runtime", "from deepspeed.pipe import PipelineModule"),
    ],
)
def test_the_check_finds_what_it_is_for(module, source):
    assert list(faults(module, source, set(modules())))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("launcher.plan.build", "import json\nfrom launcher.contract.plan import Plan"),
        ("launcher.config.compose", "import hydra"),
        ("launcher.runtime.train.loop", "import torch\nfrom launcher.contract.plan import Plan"),
        ("launcher_plugins.parallel.data.runtime", "import torch\nfrom launcher.runtime.api import Update"),
    ],
)
def test_the_check_accepts_what_is_allowed(module, source):
    assert list(faults(module, source, set(modules()))) == []
