"""Every example in a docstring gives what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = {"launcher": REPOSITORY, "launcher_plugins": REPOSITORY / "plugins"}
WITH_EXAMPLES = [
    ".".join(path.relative_to(root).with_suffix("").parts)
    for package, root in ROOTS.items()
    for path in sorted((root / package).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_are_true(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0
