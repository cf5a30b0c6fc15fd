"""Every module imports only its own floor and lower ones, and no cycle ties modules together."""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

FLOORS = {
    "launcher": 0,
    "launcher.compilers": 0,
    "launcher.errors": 0,
    "launcher.hints": 0,
    "launcher.legible": 0,
    "launcher.units": 0,
    "launcher.typed": 0,
    "launcher.scalars": 0,
    "launcher.resources": 0,
    "launcher.config.ranges": 1,
    "launcher.config.schema": 1,
    "launcher.config.site_schema": 1,
    "launcher.topology": 1,
    "launcher.schedule.actions": 1,
    "launcher.plan.model": 1,
    "launcher.jobs.script": 1,
    "launcher.metrics.records": 1,
    "launcher.metrics.heartbeat": 1,
    "launcher.bench.records": 1,
    "launcher.executor": 2,
    "launcher.interfaces": 2,
    "launcher.registry": 2,
    "launcher.config": 3,
    "launcher.schedule": 3,
    "launcher.plan": 3,
    "launcher.config.compose": 4,
    "launcher.config.override_grammar": 4,
    "launcher.config.yaml_files": 4,
    "launcher.jobs": 4,
    "launcher.metrics": 4,
    "launcher.bench": 4,
    "launcher.recipe": 4,
    "launcher.report": 4,
    "launcher.sweep": 4,
    "launcher.testing": 4,
    "launcher.runtime": 5,
    "launcher.cli": 6,
    "launcher.__main__": 6,
}
"""The floor of a module is that of the longest prefix of its name."""
RUNTIME, EDGES, PLUGIN_PLAN_HALF = 5, 4, 2
COMPOSE_MODULES = {f"launcher.config.{name}" for name in ("compose", "override_grammar", "yaml_files")}
COMPOSE_LIBRARIES = {"hydra", "omegaconf", "yaml", "antlr4"}
RUNTIME_LIBRARIES = {"torch", "numpy", "safetensors", "deepspeed"}
TESTING_LIBRARIES = {"pytest"}
MEASURES = ("launcher.runtime.", "launcher.metrics.")
PREDICTS = ("launcher.plan.", "launcher.schedule.simulate", "launcher.schedule.planned")
HANDED_OVER = "launcher.plan.model"
"""What a plan holds: the one part of planning that ranks know."""
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


def floor(module: str) -> int:
    """The floor of a module of the core."""
    name = module
    while name not in FLOORS:
        name = name.rpartition(".")[0]
    if name == "launcher" and module != "launcher":
        raise AssertionError(f"{module} is on no floor: add it to FLOORS")
    return FLOORS[name]


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
    is_runtime_half = module.endswith("_runtime")
    for name in imports(source):
        top = name.partition(".")[0]
        if name in known and top == "launcher_plugins":
            if not is_plugin or (name.endswith("_runtime") and not is_runtime_half):
                yield f"{module} imports {name}: plugins enter by their entry points"
        elif name in known:
            if not _may_import(module, name):
                yield f"{module} imports {name}, which is above it"
            if module.startswith(MEASURES) and name.startswith(PREDICTS) and name != HANDED_OVER:
                yield f"{module} imports {name}: what measures never imports what predicts"
        elif name.startswith(PEERS):
            yield f"{module} imports {name}: the pipeline is our own"
        elif top not in _libraries(module):
            yield f"{module} imports {name}: not on this floor"


def _may_import(module: str, name: str) -> bool:
    target = floor(name)
    if module.startswith("launcher_plugins"):
        is_runtime_half = module.endswith("_runtime")
        return target <= PLUGIN_PLAN_HALF or (is_runtime_half and target == RUNTIME)
    own = floor(module)
    if own == RUNTIME:
        return target == RUNTIME or target < EDGES
    return target <= own and target != RUNTIME


def _libraries(module: str) -> frozenset[str]:
    """Top-level names that a module may import beside those of its own floor."""
    always = sys.stdlib_module_names | {"launcher", "launcher_plugins"}
    if module in COMPOSE_MODULES:
        return always | COMPOSE_LIBRARIES
    if module.startswith("launcher.runtime") or module.endswith("_runtime"):
        return always | RUNTIME_LIBRARIES
    return always | TESTING_LIBRARIES if module.startswith("launcher.testing") else always


def _is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


@pytest.mark.parametrize("module", modules())
def test_module_imports_only_its_own_floor_and_lower_ones(module):
    assert list(faults(module, modules()[module].read_text(), set(modules()))) == []


def test_no_import_at_the_head_of_a_module_closes_a_cycle():
    known = modules()
    graph = {}
    for module, path in known.items():
        head = [node for node in ast.parse(path.read_text()).body if not _is_for_types_only(node)]
        statements = [node for node in head if isinstance(node, ast.Import | ast.ImportFrom)]
        named = {name for node in statements for name in imports(ast.unparse(node))}
        graph[module] = (named & set(known)) - {module}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("launcher.plan.build", "from launcher.jobs import store"),
        ("launcher.plan.build", "import torch"),
        ("launcher.plan.build", "def late():\n    import yaml"),
        ("launcher.errors", "from launcher.config.schema import LaunchConfig"),
        ("launcher.runtime.loop", "from launcher.metrics.read import read_run"),
        ("launcher.runtime.memory", "from launcher.plan.memory import part_bytes"),
        ("launcher.runtime.metrics", "from launcher.schedule import simulate"),
        ("launcher.metrics.read", "from launcher.plan import timing"),
        ("launcher.cli.run", "import launcher.runtime.main"),
        ("launcher.registry", "import launcher_plugins.executors.torchrun"),
        ("launcher_plugins.parallel.data", "from launcher.plan import build"),
        ("launcher_plugins.parallel.data", "import torch"),
        ("launcher_plugins.parallel.data", "from launcher_plugins.parallel import data_runtime"),
        ("launcher.jobs.store", "from rich import print"),
        ("launcher.runtime.pipeline", "from torch.distributed import pipelining"),
        ("launcher_plugins.parallel.pipeline_runtime", "from deepspeed.pipe import PipelineModule"),
    ],
)
def test_the_check_finds_what_it_is_for(module, source):
    assert list(faults(module, source, set(modules())))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("launcher.plan.build", "import json\nfrom launcher.plan.model import Plan"),
        ("launcher.config.compose", "import hydra"),
        ("launcher.runtime.loop", "import torch\nfrom launcher.plan.model import Plan"),
        ("launcher_plugins.parallel.data_runtime", "import torch\nfrom launcher.runtime.api import Update"),
    ],
)
def test_the_check_accepts_what_is_allowed(module, source):
    assert list(faults(module, source, set(modules()))) == []
