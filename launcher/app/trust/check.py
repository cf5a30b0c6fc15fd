"""Whether what a recipe names may be run or read: the one place that decides, before anything is imported."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from launcher.app.trust.question import Allow, Named, Question, always
from launcher.app.trust.store import is_trusted, memory_problem, shared_by_all
from launcher.base.errors import ConfigError, Fault
from launcher.base.registry import declared_targets
from launcher.config.compose import Composed
from launcher.config.paths import value_at, walk
from launcher.config.set_by_recipe import source_of
from launcher.contract.config import LaunchConfig
from launcher.contract.data.config import BYTES
from launcher.contract.data.files import PACKAGE
from launcher.contract.site import SiteConfig
from launcher.typed.read import plain
from launcher.typed.trust import Mark, marked

_NO_FILES = ("auto", "none", BYTES)
"""Words in the place of a path, for `report.baseline` and `data.tokenizer`."""


class NotTrustedError(ConfigError):
    """What a recipe names is not run, as its folder is not trusted."""


def check(composed: Composed, config: LaunchConfig, allow: Allow) -> list[str]:
    """Has the reader decide on the code and the files that a recipe names. What the launcher, an installed
    package or the reader themselves have named needs no decision.

    Returns the folders that modules may be imported from: of the recipe and the current one, but for those
    that came with a recipe and are not trusted.

    Raises:
        NotTrustedError: when it may not be run.
    """
    found, places = composed.folders, [str(Path(composed.recipe_path).parent), "."]
    named = tuple(_named(composed, config))
    _decide(Question(folders=found, named=named), allow)
    if named or allow is always or is_trusted(found, ()):
        return places
    return [place for place in places if not _is_inside(place, found)]


def check_recorded(folder: Path, configs: Sequence[LaunchConfig], allow: Allow) -> None:
    """Has the reader decide on what recorded runs in a folder would run, where it is somebody else's.

    Raises:
        NotTrustedError: when it may not be run.
    """
    if folder.stat().st_uid == os.geteuid():
        return
    named: dict[tuple[str, str], Named] = {}
    for config in configs:
        found = {path: value_at(config, path) for path, mark in marked(LaunchConfig) if mark.kind == "code"}
        usual = plain(SiteConfig())
        found |= {f"site.{name}": value for name, value in plain(config.site).items() if value != usual[name]}
        for path, value in found.items():
            if value is not None:
                text = str(value)
                named[path, text] = Named(path=path, value=text, where=str(folder))
    _decide(Question(folders=(folder.resolve(),), named=tuple(named.values())), allow)


def _decide(question: Question, allow: Allow) -> None:
    if not question.named or is_trusted(question.folders, question.targets):
        return
    if allow is always or (shared_by_all(question.folders) is None and allow(question)):
        return
    raise NotTrustedError(_refused(question))


def _refused(question: Question) -> Iterator[Fault]:
    folder = " and ".join(map(str, question.folders))
    rule = f"{folder} is not a folder whose recipes you have allowed to run code and to read other files"
    fix = "See what it is; then give --trust, or plan it once on a terminal, where you are asked."
    if shared := shared_by_all(question.folders):
        rule = f"everybody can write to {shared}, so it is not trusted and not asked about"
        fix = "Move the recipe to a folder of your own, or see what it is and give --trust."
    elif problem := memory_problem(question.folders):
        rule, fix = f"{rule}, and {problem}", "See what it is; then give --trust."
    for named in question.named:
        yield Fault(named.path, named.value, rule, fix, named.where)


def _named(composed: Composed, config: LaunchConfig) -> Iterator[Named]:
    """The settings of a recipe that have to be decided on."""
    written = dict(walk(composed.values))
    own = {path: mark for path, mark in marked(LaunchConfig) if mark.kind == "code" and composed.folders}
    for path, mark in {**own, **composed.asked}.items():
        value = value_at(config, path)
        if value is None:
            continue
        where = source_of(path, composed.sources, composed.recipe_path)
        if mark.kind == "code":
            is_below = _is_below(value, composed.folders)
            if not is_below and (path not in composed.asked or _is_declared(value, mark, composed.folders)):
                continue  # it is the reader's, or an installed package's
            target = "" if is_below else value
            options = written.get(f"{path.rpartition('.')[0]}.options")
            given = json.dumps(options, default=str) if options else ""
            yield Named(path=path, value=value, where=where, options=given, target=target)
        elif mark.kind == "files":
            for file in [value] if isinstance(value, str) else value:
                if _leaves(file, composed.folders):
                    yield Named(path=path, value=file, where=where)


def _is_declared(target: str, mark: Mark, folders: Sequence[Path]) -> bool:
    """Whether an installed package, none in the recipe's folder, declares that recipes may name this."""
    places = declared_targets(mark.entry_group).get(target, ())
    return any(not any(place.is_relative_to(folder) for folder in folders) for place in places)


def _is_below(target: str, folders: Sequence[Path]) -> bool:
    """Whether a module is one of the recipe's folder and of nowhere else, be it in the current folder where
    that is below the recipe's. Nothing is imported."""
    name = target.partition(":")[0].partition(".")[0]
    if name in sys.stdlib_module_names or not name.isidentifier():
        return False
    here = [os.getcwd()] if _is_inside(".", folders) else []
    beside = PathFinder.find_spec(name, [*map(str, folders), *here])
    return beside is not None and all(
        any(place.is_relative_to(folder) for folder in folders)
        for spec in (beside, _installed(name))
        for place in _places(spec)
    )


def _installed(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ValueError:  # a module that a program has made for itself has none
        return None


def _places(spec: ModuleSpec | None) -> Iterator[Path]:
    if spec is None:
        return
    for place in spec.submodule_search_locations or [spec.origin or "/"]:
        yield Path(place).resolve()


def _leaves(source: str, folders: Sequence[Path]) -> bool:
    """Whether a path or a glob of files reaches outside of the folders, be it by a link."""
    if source.startswith(PACKAGE) or source in _NO_FILES:
        return False
    if ".." in source.split("/"):
        return True
    path = os.path.abspath(os.path.expanduser(source))
    fixed = path[: min((path.find(letter) for letter in "*?[" if letter in path), default=len(path))]
    start = fixed if fixed == path else os.path.dirname(fixed)
    if not _is_inside(start, folders):
        return True
    found = [path] if os.path.exists(path) else glob.iglob(path, recursive=True)
    return any(not _is_inside(file, folders) for file in found)


def _is_inside(path: str, folders: Sequence[Path]) -> bool:
    resolved = Path(os.path.realpath(path))
    return any(resolved.is_relative_to(folder) for folder in folders)
