"""The files of a user's own code: the modules that settings name, and what these import from beside them."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from launcher.contract.config import LaunchConfig

_OURS = __name__.partition(".")[0]
OF_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Names of the folders that packages are installed in."""


def code_digests(config: LaunchConfig, roots: Sequence[str], *, with_installed: bool) -> dict[str, str]:
    """A digest of each of `code_files`."""
    files = code_files(config, roots, with_installed=with_installed)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def code_files(config: LaunchConfig, roots: Sequence[str], *, with_installed: bool) -> dict[str, Path]:
    """Files by their path below the folder that they are imported from, sorted; nothing is imported.

    ``roots``: folders on the module path. ``with_installed``: also of named modules that are installed; what
    these import only where they are installed from a folder of the user's (``pip install -e``).
    """
    named = [target.partition(":")[0] for target in _targets(config)]
    installed = [folder for module in named for folder in _installed_in(module)] if with_installed else []
    of_user = [*map(Path, roots), *(folder for folder in installed if not OF_INSTALLED & {*folder.parts})]
    found: dict[str, Path] = {}
    left = [(module, [*of_user, *installed]) for module in named]
    while left:
        for name, path in _files(*left.pop()):
            if name not in found:
                found[name] = path
                if not OF_INSTALLED & {*path.parts}:
                    left += [(module, of_user) for module in _imported(path, name)]
    return dict(sorted(found.items()))


def shadowed_files(config: LaunchConfig, roots: Sequence[str]) -> dict[str, tuple[Path, str]]:
    """The modules below ``roots`` that the code imports and whose names Python or an installed package has:
    each one's file there, and the one that is imported in its place (empty: it is in no file)."""
    found: dict[str, tuple[Path, str]] = {}
    for name, path in code_files(config, roots, with_installed=False).items():
        module, own = name.partition("/")[0].removesuffix(".py"), path.parents[name.count("/")]
        spec = None
        with suppress(ValueError):  # as in `_installed_in`
            spec = find_spec(module)
        places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
        is_own = any(_is_same(place, own / inner) for place in places for inner in _places(module))
        if places and not is_own:
            found.setdefault(module, (path, places[0] if os.path.isabs(places[0]) else ""))
    return found


def _places(module: str) -> tuple[str, ...]:
    return f"{module}.py", f"{module}/__init__.py", module


def _is_same(place: str, path: Path) -> bool:
    return path.exists() and os.path.realpath(place) == os.path.realpath(path)


def _targets(config: LaunchConfig) -> list[str]:
    groups = (getattr(config, field.name) for field in fields(config))
    return [target for group in groups if (target := getattr(group, "target", None))]


def _installed_in(module: str) -> Iterator[Path]:
    """The folder that a module is installed in."""
    spec = None
    with suppress(ValueError):  # a module that a program has made for itself has none
        spec = find_spec(module.partition(".")[0])
    if spec and spec.submodule_search_locations:
        yield from (Path(place).parent for place in spec.submodule_search_locations)
    elif spec and spec.origin:
        yield Path(spec.origin).parent


def _files(module: str, folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """The files that an import of a module runs: those of its packages, and its own."""
    parts = module.split(".")
    names = ["/".join(parts[: number + 1]) for number in range(len(parts))]
    for folder in folders if parts[0] != _OURS else ():
        files = [
            next((file for file in (f"{name}/__init__.py", f"{name}.py") if (folder / file).is_file()), None)
            for name in names
        ]
        if any(files):
            return [(file, folder / file) for file in files if file]
    return []


def _imported(path: Path, name: str) -> Iterator[str]:
    """The modules that a file imports anywhere in it. What is imported from one may be a module, too."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # told by its own import
        return
    package = name.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = [*base, *filter(None, [node.module])]
            yield from (".".join([*module, alias.name]) for alias in node.names)
