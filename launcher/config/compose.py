"""Composes a recipe with Hydra and says where every value comes from.

The only module that imports hydra, omegaconf and yaml. Hydra decides which files are merged in
which order and applies the overrides. The files are read and the scalars of the overrides are
kept as text here, so that one spelling has one meaning. Hydra's own settings and its plugins are
left out: loading them takes half of the time, and nothing here uses them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from antlr4 import CommonTokenStream, InputStream
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import create_functions
from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher import resources
from launcher.config import origins, overrides
from launcher.config.nodes import NodeReader
from launcher.config.recipes import SUFFIX, Recipe, find
from launcher.errors import ConfigError, Fault, LauncherError, did_you_mean
from launcher.typed import Source

_PRIMARY = "<recipe>"
"""Hydra's name for the recipe's own file, whatever the file is called."""
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_UNSET = "???"


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


def compose(recipe: str, words: Sequence[str] = ()) -> Composed:
    """The values of a recipe (a shipped name or a path) under override words.

    Raises:
        ConfigError: for values or overrides that cannot be merged, with every one of a kind.
        LauncherError: for a recipe that is not there, or that Hydra cannot merge.
    """
    found = find(recipe)
    parsed = _parse_all(words)
    files = _repository(found)
    config, sources, changes = _merge(files, [override for override, _ in parsed], found)
    _apply(parsed, changes, config, sources)
    if config.get("name") is None or OmegaConf.is_missing(config, "name"):
        config["name"] = found.run_name
        sources["name"] = Source(where="the recipe's file name")
    values = _without_unset(_resolve(config, sources))
    return Composed(
        values=values,
        sources=origins.settle(values, sources),
        recipe_path=str(found.path),
        notes=(*([found.note] if found.note else []), *_hidden_files(files)),
    )


# Files


@dataclass(frozen=True, kw_only=True)
class _Document:
    """One YAML file: its values, and the source of each by its path inside the file."""

    label: str
    header: Mapping[str, str | None]
    values: dict[str, Any]
    marks: Mapping[str, Source]


class _Folder(ConfigSource):
    """A folder of YAML files, or with ``only`` a single one under the name `_PRIMARY`."""

    def __init__(self, folder: Path, label: str, only: Path | None = None) -> None:
        super().__init__(provider=label, path=f"{self.scheme()}://{folder}")
        self.folder, self.label, self.only = folder, label, only
        self.documents: dict[str, _Document] = {}

    @staticmethod
    def scheme() -> str:
        return "file"

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file(config_path)
        label = str(Path(self.label, file.relative_to(self.folder)))
        document = self.documents[config_path] = _read(file, label)
        config = OmegaConf.create(document.values)
        return ConfigResult(
            provider=self.provider, path=self.path, config=config, header=dict(document.header)
        )

    def file(self, config_path: str) -> Path:
        """The file of a config, whether or not it is there."""
        if self.only:
            return self.only if config_path == _PRIMARY else self.folder / _UNSET
        return self.folder / f"{config_path.removesuffix(SUFFIX)}{SUFFIX}"

    def is_config(self, config_path: str) -> bool:
        return self.file(config_path).is_file()

    def is_group(self, config_path: str) -> bool:
        return not self.only and (self.folder / config_path).is_dir()

    def available(self) -> bool:
        return self.folder.is_dir()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if not self.is_group(config_path):
            return []
        if results_filter == ObjectType.GROUP:
            return sorted(file.name for file in (self.folder / config_path).iterdir() if file.is_dir())
        return sorted(file.stem for file in (self.folder / config_path).glob(f"*{SUFFIX}"))


def _read(file: Path, label: str) -> _Document:
    try:
        text = file.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=_LOADER)
        header = ConfigSource._get_header_dict(text[:512])
        reader = NodeReader(label)
        values = {} if node is None else reader.read(node)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f":{mark.line + 1}" if mark else ""
        raise LauncherError(f"{label}{line}: not YAML: {problem or error}") from error
    except (OSError, ValueError) as error:
        raise LauncherError(f"{label}: cannot be read: {error}") from error
    except RecursionError as error:
        raise LauncherError(f"{label}: an alias stands inside of its own anchor") from error
    if not isinstance(values, dict):
        raise LauncherError(f"{label}: must hold key: value lines, not a {type(values).__name__}")
    if reader.faults:
        raise ConfigError(reader.faults)
    return _Document(label=label, header=header, values=values, marks=reader.marks)


def _repository(recipe: Recipe) -> CachingConfigRepository:
    """The recipe, then its folder, then the shipped recipes and groups: the first file found counts."""
    shipped = [resources.folder("recipes"), resources.folder("conf")]
    home = recipe.path.parent
    folders = [_Folder(folder, folder.name) for folder in shipped]
    if home.resolve() != shipped[0].resolve():
        folders.insert(0, _Folder(home, str(home)))
    repository = ConfigRepository(ConfigSearchPathImpl())
    primary = _Folder(home, folders[0].label, only=recipe.path)
    repository.sources = [primary, *folders, StructuredConfigSource("schema", "structured://")]
    return CachingConfigRepository(repository)


def _folders(files: CachingConfigRepository) -> list[_Folder]:
    return [source for source in files.get_sources() if isinstance(source, _Folder)]


def _hidden_files(files: CachingConfigRepository) -> Iterator[str]:
    for used in _folders(files):
        for config_path, document in used.documents.items():
            for other in _folders(files):
                if other is not used and other.is_config(config_path):
                    yield f"{document.label} is used and hides {Path(other.label, config_path)}{SUFFIX}"


# Overrides


class _TextVisitor(HydraOverrideVisitor):
    """Reads an override without deciding what its plain scalars mean."""

    def visitPrimitive(self, ctx: Any) -> Any:  # noqa: N802 - the name that the parser calls
        value = self._createPrimitive(ctx)
        if isinstance(value, QuotedString):
            return value
        return overrides.PlainText(value if isinstance(value, str) else ctx.getText().strip())

    def visitDictKey(self, ctx: Any) -> str:  # noqa: N802 - the name that the parser calls
        return str(ctx.getText().strip())


_Parsed = tuple[Override, Mapping[str, Source]]
"""An override with typed values, and the source of each by its path inside the value."""


def _parse_all(words: Sequence[str]) -> list[_Parsed]:
    parsed: list[_Parsed] = []
    faults: list[Fault] = []
    for word in words:
        result = _parse(word.rstrip("\r"))
        if isinstance(result, Fault):
            faults.append(result)
        else:
            parsed.append(result)
    if faults:
        raise ConfigError(faults)
    return parsed


def _parse(word: str) -> _Parsed | Fault:
    if fault := overrides.word_fault(word):
        return fault
    listener = HydraErrorListener()
    lexer = OverrideLexer(InputStream(word))
    parser: Any = OverrideParser(CommonTokenStream(lexer))
    for part in (lexer, parser):
        part.removeErrorListeners()
        part.addErrorListener(listener)
    try:
        override = _TextVisitor(create_functions()).visit(parser.override())
    except HydraException as error:
        return overrides.unreadable_fault(word, str(error))
    if override.is_sweep_override():
        return overrides.sweep_fault(word)
    marks: dict[str, Source] = {}
    override._value = overrides.typed(override._value, "", f"override {word}", marks)
    override.input_line = word
    return override, marks


def _apply(
    parsed: Sequence[_Parsed], changes: Sequence[Override], config: DictConfig, sources: dict[str, Source]
) -> None:
    """Applies the overrides that are no group choices, and notes where their values come from."""
    faults = []
    for override, marks in parsed:
        word = str(override.input_line)
        key = _bracketed(override.key_or_group, config)
        is_change = any(override is change for change in changes)
        try:
            if is_change:
                ConfigLoaderImpl._apply_overrides_to_config([override], config)
        except (HydraException, OmegaConfBaseException) as error:
            reason = str(error.__cause__ or error)
            faults.append(overrides.refused_fault(word, reason, _siblings(key, config)))
        if is_change or override.is_delete():
            origins.replace(sources, key, marks, merges=isinstance(override.value(), dict))
    if faults:
        raise ConfigError(faults)


def _bracketed(key: str, config: DictConfig) -> str:
    """A key with the places in lists in brackets: ``optim.betas.0`` is ``optim.betas[0]``."""
    node: Any = config
    path = ""
    for part in key.split("."):
        is_place = isinstance(node, ListConfig) and part.isdigit()
        path = origins.join(path, f"[{part}]" if is_place else part)
        node = OmegaConf.select(config, path, default=None) if node is not None else None
    return path


def _siblings(key: str, config: DictConfig) -> list[str]:
    parent = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
    return [str(name) for name in parent] if isinstance(parent, DictConfig) else []


# Merging


def _merge(
    files: CachingConfigRepository, given: list[Override], recipe: Recipe
) -> tuple[DictConfig, dict[str, Source], list[Override]]:
    """The merged files, the source of each value, and the overrides that are no group choices."""
    version.setbase("1.3")
    _check_choices(files, given)
    try:
        with warnings.catch_warnings():
            # A recipe without _self_ is merged after its defaults, which is what it looks like.
            warnings.simplefilter("ignore")
            defaults = create_defaults_list(files, _PRIMARY, given, prepend_hydra=False, skip_missing=False)
            loader = ConfigLoaderImpl(ConfigSearchPathImpl())
            config = loader._compose_config_from_defaults_list(defaults.defaults, files)
    except MissingConfigException as error:
        raise _missing_file(error, files, given) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        message = str(error).replace(_PRIMARY, str(recipe.path)).strip()
        raise _unmatched_default(message, files) or LauncherError(f"{recipe.path}: {message}") from error
    except RecursionError as error:
        raise LauncherError(f"{recipe.path}: its defaults lead back to one of themselves") from error
    sources: dict[str, Source] = {}
    for default in defaults.defaults:
        document = next(
            f.documents[default.config_path] for f in _folders(files) if default.config_path in f.documents
        )
        package = (default.package or "").removeprefix("_global_").removeprefix(".")
        placed = {origins.join(package, path): source for path, source in document.marks.items()}
        sources |= {path: source for path, source in placed.items() if path}
    return config, sources, defaults.config_overrides


def _check_choices(files: CachingConfigRepository, given: Sequence[Override]) -> None:
    faults = []
    for override in given:
        group, word = override.key_or_group, str(override.input_line)
        is_choice = override.is_delete() or isinstance(override.value(), str | list | dict)
        if not is_choice and files.group_exists(group):
            name = overrides.split(word)[1]
            fix = did_you_mean(name, files.get_group_options(group, ObjectType.CONFIG))
            faults.append(Fault(group, name, "must name a file of the group", fix, f"override {word}"))
    if faults:
        raise ConfigError(faults)


def _missing_file(
    error: MissingConfigException, files: CachingConfigRepository, given: Sequence[Override]
) -> LauncherError:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    names = files.get_group_options(group, ObjectType.CONFIG)
    where = next((f"override {item.input_line}" for item in given if item.key_or_group == group), "")
    where = where or _line_of_default(name, files)
    rule = f"no such file in the group {group}" if group else "no such file"
    return ConfigError([Fault(group or "defaults", name, rule, did_you_mean(name, names), where)])


def _unmatched_default(message: str, files: CachingConfigRepository) -> LauncherError | None:
    """The fault that Hydra's message means, where it is of a defaults list that overrides nothing."""
    if (match := re.search(r"Could not override '([^'@]+)'\. No match", message)) is None:
        return None
    name = match[1]
    groups = files.get_group_options("", ObjectType.GROUP)
    fault = Fault("defaults", name, "no group of this name is chosen", did_you_mean(name, groups))
    return ConfigError([replace(fault, where=_line_of_default(name, files))])


def _line_of_default(name: str, files: CachingConfigRepository) -> str:
    """File and line of the entry of a defaults list that names a group or a file."""
    for document in (document for folder in _folders(files) for document in folder.documents.values()):
        for path, source in document.marks.items():
            words = (path.rpartition("/")[2], str(source.text).rpartition("/")[2])
            if path.startswith("defaults[") and name in words:
                return source.where
    return ""


def _resolve(config: DictConfig, sources: Mapping[str, Source]) -> dict[str, Any]:
    """Plain values with every ``${...}`` computed."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except (OmegaConfBaseException, RecursionError) as error:
        path = str(getattr(error, "full_key", None) or "")
        given = dict(origins.walk(OmegaConf.to_container(config))).get(path, "")
        where = sources[path].where if path in sources else ""
        rule = str(error).partition("\n")[0]
        raise ConfigError(
            [Fault(path, given, rule, "Refer to a setting that has a value.", where)]
        ) from error
    assert isinstance(values, dict), "a composed configuration is a group"
    return {str(key): value for key, value in values.items()}


def _without_unset(value: Any) -> Any:
    """The values without those that a file leaves to be given (``???``)."""
    if isinstance(value, Mapping):
        return {key: _without_unset(item) for key, item in value.items() if item != _UNSET}
    return value
