"""Keys of settings and their values, from the classes of the configuration and the names of files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from launcher.base import registry, resources
from launcher.base.errors import PluginError
from launcher.cli.completion import files
from launcher.config.recipes import SUFFIX, description, shipped
from launcher.contract.config import LaunchConfig
from launcher.typed.read import field_types
from launcher.typed.trust import groups_of_reader

_SCHEDULES = "launcher.schedules"
_PLUGINS = {
    "architecture": ("launcher.architectures", "architecture"),
    "optim": ("launcher.optimizers", "optim"),
    "executor": ("launcher.executors", "executor"),
    "parallel.schedule_options": (_SCHEDULES, "parallel.schedule"),
}
"""Groups of settings that are those of a plugin: its entry-point group, and the setting that names it."""
_PATHS = (
    "run.dir",
    "run.root",
    "model.path",
    "train.init_from",
    "data.source",
    "data.eval_source",
    "data.tokenizer",
    "data.cache_dir",
)
_RUNS = {"report.baseline": ("auto", "none"), "device.measured_in": ("null",)}
"""Settings that name a run, with their other values."""


def settings(word: str, given: Sequence[str], recipe: str) -> Iterator[files.Candidate]:
    """How a setting can be completed: keys, and behind ``=`` values; of several values, the last.

    ``given`` are the settings before it, which choose the plugins whose options are known; ``recipe`` is the
    path of the recipe's file, beside which groups are looked for, or "".
    """
    mark = word[: len(word) - len(word.lstrip("+~"))]
    key, equals, value = word.removeprefix(mark).partition("=")
    if not equals:
        chosen = dict(item.lstrip("+").partition("=")[::2] for item in given)
        end = "" if mark == "~" else "="  # ~key takes one out
        yield from ((f"{mark}{name}", "") for name in _keys(key, chosen, recipe, end))
        return
    whole, comma, _ = value.rpartition(",")
    start = f"{mark}{key}={whole}{comma}"
    for name, told in _values(key, value.removeprefix(whole + comma), recipe):
        yield start + name, told


def choices(group: str, recipe: str) -> Iterator[files.Candidate]:
    """The files of a group that a recipe can choose from, each with its first comment line."""
    for name, path in sorted(_groups(recipe).get(group, {}).items()):
        yield name, description(path)


def recipes() -> Iterator[files.Candidate]:
    """The shipped recipes, each with its first comment line."""
    for name, path in shipped().items():
        yield name, description(path)


def _keys(key: str, chosen: Mapping[str, str], recipe: str, end: str) -> Iterator[str]:
    """The keys beside ``key``; what holds others ends in a dot, what takes a value in ``end``."""
    outer = key.rpartition(".")[0]
    for name, kind in _fields(outer, chosen).items():
        path = f"{outer}.{name}" if outer else name
        holds_others = dataclasses.is_dataclass(kind) or path in _PLUGINS
        if holds_others:
            yield f"{path}."
        if not holds_others or (not outer and name in _groups(recipe)):
            yield path + end


def _fields(path: str, chosen: Mapping[str, str]) -> Mapping[str, Any]:
    """The settings in a group by name, each with its type."""
    fields = field_types(LaunchConfig)
    for name in filter(None, path.split(".")):
        kind = fields.get(name)
        fields = field_types(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else {}
    if path in _PLUGINS:
        group, setting = _PLUGINS[path]
        own = {name: kind for name, kind in fields.items() if name not in ("name", "options")}
        return {**own, **_options(group, chosen.get(setting))}
    return fields


def _options(group: str, name: str | None) -> Mapping[str, Any]:
    """The options of the plugin of that name, or of every plugin of the group."""
    from launcher.contract.executor import Executor  # as the plugins themselves, which few completions load
    from launcher.contract.optim.plugin import Optimizer
    from launcher.contract.strategy import Architecture, Schedule

    kinds: tuple[type[registry.Plugin], ...] = (Schedule, Architecture, Optimizer, Executor)
    kind = next(kind for kind in kinds if kind.entry_group == group)
    found: dict[str, Any] = {}
    for known in registry.plugins(group):
        if name in (known, None):
            with suppress(PluginError):
                config = getattr(registry.load(kind, known), "Config", None)
                found |= field_types(config) if config else {}
    return found


def _values(key: str, word: str, recipe: str) -> Iterator[files.Candidate]:
    """The values of a setting that can be listed."""
    if key in _PATHS:
        yield from files.paths(word)
    elif key in _RUNS:
        yield from ((name, "") for name in _RUNS[key])
        yield from files.runs(word, from_here=True)
    elif key == "parallel.schedule":
        yield from ((name, "") for name in registry.plugins(_SCHEDULES))
    else:
        yield from choices(key, recipe)
        outer, _, name = key.rpartition(".")
        yield from ((text, "") for text in _words_of(_fields(outer, {}).get(name)))


def _words_of(kind: Any) -> Iterator[str]:
    """The words that a type allows."""
    if kind is bool:
        yield from ("true", "false")
    elif kind is NoneType:
        yield "null"
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif get_origin(kind) not in (tuple, Annotated, Mapping):
        for inner in get_args(kind):
            yield from _words_of(inner)


def _groups(recipe: str) -> Mapping[str, Mapping[str, Path]]:
    """The files of every group of settings by name, as Hydra finds them: beside the recipe first."""
    known = [item.name for item in dataclasses.fields(LaunchConfig)]
    found: dict[str, dict[str, Path]] = {}
    places = [resources.user_folder(), resources.folder("conf")]
    if recipe:
        places.append(Path(os.path.expanduser(recipe)).parent)
    for place in places:
        for group in known:
            if place not in places[:2] and group in groups_of_reader(LaunchConfig):
                continue
            names = {path.stem: path for path in place.glob(f"{group}/*{SUFFIX}")}
            if names:
                found.setdefault(group, {}).update(names)
    return found
