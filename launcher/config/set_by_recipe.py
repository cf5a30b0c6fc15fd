"""What a recipe's own folder sets of the settings that no recipe may set, or none unasked.

Who has set a value is told by the value itself: the same files are merged again without the values of those
in the recipe's folder, and what then differs comes from there, by whatever references, packages and lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.base import resources
from launcher.base.errors import Fault
from launcher.config.load import plugin_options
from launcher.config.recipes import SUFFIX
from launcher.config.yaml_files import BASE, READER_GROUPS, folders, line_of_default
from launcher.contract.config import LaunchConfig
from launcher.typed.read import MISSING, Source, join
from launcher.typed.trust import Mark, marked


class _WithoutRecipe(CachingConfigRepository):
    """The same files, of which those of the recipe's folder hold nothing but their defaults lists."""

    def __init__(self, files: CachingConfigRepository) -> None:
        self.delegate, self.cache = files, {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        found = self.delegate.load_config(config_path)
        for folder in folders(self):
            if found is not None and (document := folder.documents.get(config_path)):
                # Made anew: Hydra merges into the nodes that it was given.
                kept = {} if folder.is_foreign else {**document.values}
                kept.pop("defaults", None)
                found = ConfigResult(
                    provider=found.provider,
                    path=found.path,
                    config=OmegaConf.create(kept),
                    header=found.header,
                    defaults_list=found.defaults_list,
                )
        return found


def without_recipe(merged: Sequence[ResultDefault], files: CachingConfigRepository) -> DictConfig | None:
    """What is merged but for the values of the recipe's folder; None where it is nobody else's."""
    if not any(folder.is_foreign for folder in folders(files)):
        return None
    defaults = [*merged]
    if not any(default.config_path == BASE for default in merged):  # it has to set everything by itself
        defaults = create_defaults_list(files, BASE, [], prepend_hydra=False, skip_missing=False).defaults
    loader = ConfigLoaderImpl(ConfigSearchPathImpl())
    return loader._compose_config_from_defaults_list(defaults, _WithoutRecipe(files))


def apply_to_rest(changes: Sequence[Override], rest: DictConfig) -> None:
    """Applies overrides to what is merged without the recipe's folder, even to groups that only this has."""
    for override in changes:
        with suppress(OmegaConfBaseException, TypeError, ValueError, IndexError, RecursionError):
            if not override.is_delete():
                OmegaConf.update(rest, override.key_or_group, override.value(), force_add=True)
            elif OmegaConf.select(rest, override.key_or_group) is not None:
                ConfigLoaderImpl._apply_overrides_to_config([override], rest)


def set_by_recipe(values: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[tuple[str, Mark]]:
    """The marked settings whose resolved values are not the ``others``, those without the recipe."""
    settings = [*marked(LaunchConfig)]
    for path, declared, _ in plugin_options(values):
        settings += marked(declared, path)
    for path, mark in settings:
        for place in _differing(path, _at(values, path), _at(others, path)):
            yield place, mark


def reader_fault(path: str, value: Any, where: str) -> Fault:
    """The fault of a recipe that sets what its reader decides on."""
    fix, group = "Remove it from the recipe, and give it on the command line", path.partition(".")[0]
    if group in READER_GROUPS:
        fix += f", or in a file of {resources.user_folder() / group}/"
    rule = "is not for a recipe to set: it is the reader's own"
    return Fault(path, value, rule, f"{fix}.", where, ways=({path: value},))


def beside_recipe(files: CachingConfigRepository, config_path: str) -> str:
    """The file beside a recipe that is not read, as its group is the reader's; empty where there is none."""
    if config_path.partition("/")[0] not in READER_GROUPS:
        return ""
    places = (folder.folder / f"{config_path}{SUFFIX}" for folder in folders(files) if folder.is_foreign)
    return next((str(place) for place in places if place.is_file()), "")


def beside_faults(files: CachingConfigRepository) -> Iterator[Fault]:
    """The faults of files of the reader that have another one of their name beside the recipe."""
    for path in (path for folder in folders(files) for path in folder.documents):
        if file := beside_recipe(files, path):
            group, _, name = path.partition("/")
            yield beside_fault(group, name, file, line_of_default(name, files))


def beside_fault(group: str, given: str, file: str, where: str) -> Fault:
    """The fault of a file beside the recipe in a group that is the reader's."""
    rule = f"{file} came with the recipe, and a {group} is the reader's own"
    fix = f"Read it, and move it to {resources.user_folder() / group}/ if it is to be used."
    return Fault(group, given, rule, fix, where)


def source_of(path: str, sources: Mapping[str, Source], recipe: str) -> str:
    """File and line that have set a value for a recipe; where an override refers to it, the recipe alone."""
    while path and path not in sources:
        path = path.rpartition("[" if path.endswith("]") else ".")[0]
    where = sources[path].where if path else ""
    return recipe if not where or where.startswith("override ") else where


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values.get(name, MISSING) if isinstance(values, Mapping) else MISSING
    return values


def _differing(path: str, ours: Any, theirs: Any) -> Iterator[str]:
    """The paths at and below ``path`` where a value of ours is not theirs. What is missing sets nothing."""
    if isinstance(ours, Mapping) and (isinstance(theirs, Mapping) or theirs is MISSING):
        others = theirs if isinstance(theirs, Mapping) else {}
        for key, value in ours.items():
            yield from _differing(join(path, str(key)), value, others.get(key, MISSING))
    elif ours is not MISSING and (type(ours), ours) != (type(theirs), theirs):
        yield path
