"""Composes a recipe with Hydra and records the source of every value.

Hydra determines which files are merged in which order, and applies the overrides. The files are read by
`yaml_files`, the overrides by `override_grammar`, references resolved by `interpolations`, and what a recipe
may not set found by `set_by_recipe`; no other module imports hydra, omegaconf or yaml.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.base.errors import (
    LEFT_OUT,
    ConfigError,
    Fault,
    LauncherError,
    did_you_mean,
    faults_text,
    nearest,
)
from launcher.config import overrides, paths
from launcher.config.interpolations import only_settings, resolve
from launcher.config.override_grammar import Parsed, parse_all
from launcher.config.recipes import Recipe, find
from launcher.config.set_by_recipe import (
    apply_to_rest,
    beside_fault,
    beside_faults,
    beside_recipe,
    reader_fault,
    set_by_recipe,
    source_of,
    without_recipe,
)
from launcher.config.yaml_files import (
    PRIMARY,
    UNSET,
    choices,
    folders,
    hidden_files,
    line_of_default,
    repository,
)
from launcher.typed.read import Source, join
from launcher.typed.trust import Mark

_BAD_KEY_ERRORS = (TypeError, ValueError, IndexError, RecursionError)
"""Errors that Hydra does not wrap, for a key that is not an index of a list, or too deep."""


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A recipe merged with its groups and overrides; not yet checked."""

    values: Mapping[str, Any]
    """Plain dicts, lists and scalars."""
    sources: Mapping[str, Source]
    """Where each value comes from, by config path (``optim.betas[0]``)."""
    recipe_path: str
    notes: tuple[str, ...]
    """Which file is used where two have one name."""
    faults: tuple[Fault, ...] = ()
    """Of what could not be read or applied, and so is not in the values."""
    folders: tuple[Path, ...] = ()
    """Where the recipe came in; () = it is the launcher's or the reader's own."""
    asked: Mapping[str, Mark] = field(default_factory=dict)
    """Settings that name code or files, by config path, where something in ``folders`` sets them."""


def compose(
    recipe: str,
    words: Sequence[str] = (),
    swept: Container[str] = (),
    of_recipe: Container[str] = (),
) -> Composed:
    """The values of a recipe (a shipped name or a path) with overrides, of which one point of a sweep alone
    has those ``swept``, and the recipe itself has written those ``of_recipe``.

    Faults of single values and overrides are in the result, so that later checks can add theirs.

    Raises:
        LauncherError: for a recipe that is not there, or when nothing can be merged.
    """
    found = find(recipe.rstrip("\r\n"))
    parsed, faults = parse_all(words, swept)
    try:
        with only_settings():
            return _compose(found, parsed, faults, of_recipe)
    except LauncherError as error:
        if found.note:
            error.add_note(found.note)
        if faults and not isinstance(error, ConfigError):
            raise LauncherError(f"{error}\n{faults_text(tuple(faults))}") from error
        raise


def group_files(recipe: str, group: str) -> list[str]:
    """The files of a group that a recipe can select.

    Raises:
        LauncherError: for a recipe that is not there.
    """
    return choices(repository(find(recipe)), group)


def _compose(
    recipe: Recipe, parsed: Sequence[Parsed], faults: list[Fault], of_recipe: Container[str]
) -> Composed:
    files = repository(recipe)
    usable = []
    for override, marks in parsed:
        if fault := _choice_fault(files, override):
            faults.append(fault)
        else:
            usable.append((override, marks))
    try:
        config, without, sources, changes = _merge(files, usable, recipe)
    except ConfigError as error:
        raise ConfigError([*faults, *error.faults]) from error
    faults += [*_apply(usable, changes, config, sources), *beside_faults(files)]
    written = OmegaConf.to_container(config)  # unresolved: `name` may be an invalid interpolation
    assert isinstance(written, dict), "a composed configuration is a group"
    if written.get("name") in (None, UNSET):
        config["name"] = recipe.run_name
        sources["name"] = Source(where="the recipe's file name")
    resolved, texts = resolve(config, sources, faults)
    values = _without_unset(resolved)
    asked: dict[str, Mark] = {}
    if without is not None:
        apply_to_rest([change for change in changes if change.input_line not in of_recipe], without)
        without.setdefault("name", recipe.run_name)
        for path, mark in set_by_recipe(values, _without_unset(resolve(without, sources, [])[0])):
            if mark.kind == "reader":
                where = source_of(path, sources, str(recipe.path))
                faults.append(reader_fault(path, dict(paths.walk(values)).get(path), where))
            else:
                asked[path] = mark
    _fit_warmup(values, sources)
    return Composed(
        values=values,
        sources=paths.final_sources(values, sources, texts),
        recipe_path=str(recipe.path),
        notes=(*([recipe.note] if recipe.note else []), *hidden_files(files)),
        faults=tuple(faults),
        folders=recipe.foreign_folders,
        asked=asked,
    )


# Selecting files of groups


def _choice_fault(files: CachingConfigRepository, override: Override) -> Fault | None:
    """The fault of an override that selects a file of a group that does not exist."""
    group, word = override.key_or_group, str(override.input_line)
    if not files.group_exists(group) or override.is_delete():
        return None
    value, given = override.value(), overrides.split(word)[1]
    where = f"override {word}"
    if override.is_force_add():
        rule = "a file of a group is selected without ++"
        return overrides.retyped(group, given, rule, group, given, where)
    if override.package is not None:
        rule = "files of a group are always placed at the path of the group"
        return overrides.retyped(f"{group}@{override.package}", given, rule, group, given, where)
    if isinstance(value, dict):
        return None
    names = value if isinstance(value, list) else [value]
    missing = [name for name in names if not _is_choice(files, group, name)]
    if names and not missing:
        return None
    if missing and (file := beside_recipe(files, f"{group}/{missing[0]}")):
        return beside_fault(group, given, file, where)
    rule = f"no such file in the group {group}" if isinstance(value, str) else "must name a file of the group"
    near = nearest(str(missing[0]) if missing else "", known := choices(files, group))
    ways = ({group: near},) if near else ()
    return Fault(group, given, rule, did_you_mean(near or "", known), where, ways=ways)


def _is_choice(files: CachingConfigRepository, group: str, name: Any) -> bool:
    return isinstance(name, str) and files.config_exists(
        name.removeprefix("/") if name.startswith("/") else f"{group}/{name}"
    )


# Merging


def _merge(
    files: CachingConfigRepository, parsed: Sequence[Parsed], recipe: Recipe
) -> tuple[DictConfig, DictConfig | None, dict[str, Source], list[Override]]:
    """The merged files, the same without what the recipe's folder sets, the source of each value, and the
    overrides that select no file of a group."""
    version.setbase("1.3")
    given = [override for override, _ in parsed]
    try:
        with warnings.catch_warnings():
            # A recipe without _self_ is merged after its defaults, which is what it looks like.
            warnings.simplefilter("ignore")
            defaults = create_defaults_list(files, PRIMARY, given, prepend_hydra=False, skip_missing=False)
            without = without_recipe(defaults.defaults, files)
            loader = ConfigLoaderImpl(ConfigSearchPathImpl())
            config = loader._compose_config_from_defaults_list(defaults.defaults, files)
    except MissingConfigException as error:
        raise _missing_file(error, files) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        message = str(error).replace(PRIMARY, str(recipe.path)).strip()
        if "Cannot merge" in message:
            message = "two of its files have a list and a group of settings at the same path"
        raise _unmatched(message, files, given) or LauncherError(f"{recipe.path}: {message}") from error
    except RecursionError as error:
        raise LauncherError(f"{recipe.path}: its defaults list includes itself") from error
    return config, without, _file_sources(defaults.defaults, files, parsed), defaults.config_overrides


def _file_sources(
    merged: Sequence[ResultDefault], files: CachingConfigRepository, parsed: Sequence[Parsed]
) -> dict[str, Source]:
    """The source of every value of the merged files, in their order of precedence."""
    documents = {path: document for folder in folders(files) for path, document in folder.documents.items()}
    layers: dict[str, int] = {}  # of what chooses the file of a group
    for layer, path in enumerate((str(default.config_path) for default in merged), 1):
        if documents[path].is_recipe:
            layers |= dict.fromkeys((path, *documents[path].chosen_groups), layer)
    layers |= {override.key_or_group: marks[""].layer for override, marks in parsed}
    sources: dict[str, Source] = {}
    for default in merged:
        path = str(default.config_path)
        document, group = documents[path], path.rpartition("/")[0]
        package = (default.package or "").removeprefix("_global_").removeprefix(".")
        for inner, source in document.marks.items():
            if placed := join(package, inner):
                layer = layers.get(group or path, 0)
                sources[placed] = replace(source, is_given=document.is_recipe, layer=layer)
    return sources


def _missing_file(error: MissingConfigException, files: CachingConfigRepository) -> ConfigError:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if file := beside_recipe(files, str(error.missing_cfg_file)):
        return ConfigError([beside_fault(group, name, file, line_of_default(name, files))])
    rule = f"no such file in the group {group}" if group else "no such file"
    fix = did_you_mean(name, choices(files, group))
    return ConfigError([Fault(group or "defaults", name, rule, fix, line_of_default(name, files))])


def _unmatched(
    message: str, files: CachingConfigRepository, given: Sequence[Override]
) -> LauncherError | None:
    """The fault that Hydra's message means, where a selection to replace or delete does not exist."""
    if found := re.search(r"Could not delete '([^'=]+)=?([^']*)'", message):
        word = next((str(item.input_line) for item in given if item.is_delete()), "")
        rule, fix = "no such file is selected, so there is nothing to delete", "Leave it out."
        ways, where = ({found[1]: LEFT_OUT},), f"override {word}"
        return ConfigError([Fault(found[1], found[2] or "(missing)", rule, fix, where, ways=ways)])
    if (found := re.search(r"Could not override '([^'@]+)'\. No match", message)) is None:
        return None
    name = found[1]
    groups = files.get_group_options("", ObjectType.GROUP)
    fault = Fault("defaults", name, "no group of this name is selected", did_you_mean(name, groups))
    return ConfigError([replace(fault, where=line_of_default(name, files))])


# Applying the other overrides


def _apply(
    parsed: Sequence[Parsed], changes: Sequence[Override], config: DictConfig, sources: dict[str, Source]
) -> list[Fault]:
    """Applies the overrides and records their sources; returns the faults of those that cannot be applied."""
    faults = []
    for override, marks in parsed:
        key = _bracketed(override.key_or_group, config)
        is_change = any(override is change for change in changes)
        try:
            if is_change:
                _change(override, config)
        except (HydraException, OmegaConfBaseException, *_BAD_KEY_ERRORS) as error:
            reason = str(error.__cause__ or error).partition("\n")[0]
            word = str(override.input_line)
            faults.append(overrides.refused_fault(word, reason, _siblings(key, config)))
            continue
        if is_change or override.is_delete():
            paths.replace_sources(sources, key, marks, merges=isinstance(override.value(), dict))
    return faults


def _change(override: Override, config: DictConfig) -> None:
    """Applies one override. Hydra treats a setting that is null as missing."""
    outer, _, name = override.key_or_group.rpartition(".")
    group = OmegaConf.select(config, outer) if outer else config
    values = OmegaConf.to_container(group) if isinstance(group, DictConfig) else {}
    is_null = isinstance(values, dict) and values.get(name, UNSET) is None
    if override.is_delete() and override.value() is None and is_null:
        del group[name]
    else:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)


def _bracketed(key: str, config: DictConfig) -> str:
    """A key with the indices of lists in brackets: ``optim.betas.0`` is ``optim.betas[0]``."""
    node: Any = config
    path = ""
    for part in key.split("."):
        is_index = isinstance(node, ListConfig) and part.isdigit()
        path = join(path, f"[{part}]" if is_index else part)
        found = None
        with suppress(OmegaConfBaseException, ValueError):  # an invalid path is reported later
            found = OmegaConf.select(config, path, default=None) if node is not None else None
        node = found
    return path


def _siblings(key: str, config: DictConfig) -> list[str]:
    parent: Any = config
    if "." in key:
        with suppress(OmegaConfBaseException):
            parent = OmegaConf.select(config, key.rpartition(".")[0])
    return [str(name) for name in parent] if isinstance(parent, DictConfig) else []


# What the values are in the end


def _fit_warmup(values: Mapping[str, Any], sources: dict[str, Source]) -> None:
    """Halves a default of ``report.warmup_steps`` that would leave a short run nothing to measure."""
    path = "report.warmup_steps"
    groups = (values.get(name) for name in ("report", "train"))
    report, train = (group if isinstance(group, dict) else {} for group in groups)
    warmup, num_steps = report.get("warmup_steps"), train.get("num_steps")
    is_default = path in sources and not sources[path].is_given
    if is_default and type(warmup) is type(num_steps) is int and warmup >= num_steps > 0:
        report["warmup_steps"] = num_steps // 2
        where = f"half of train.num_steps, where {sources[path].where} leaves nothing to measure"
        sources[path] = Source(where=where)


def _without_unset(value: Any) -> Any:
    """The values without those that are mandatory and not given (``???``)."""
    if isinstance(value, Mapping):
        return {key: _without_unset(item) for key, item in value.items() if item != UNSET}
    return value
