"""The YAML files of a recipe, read so that a text has one meaning, and the folders that Hydra searches."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from launcher.base import resources
from launcher.base.errors import ConfigError, Fault, LauncherError
from launcher.config.nodes import NodeReader
from launcher.config.recipes import SUFFIX, Recipe
from launcher.contract.config import LaunchConfig
from launcher.typed.read import Source
from launcher.typed.trust import groups_of_reader

BASE = "base"
"""The launcher's own file that every recipe extends."""
PRIMARY = "<recipe>"
"""Name of the recipe's own file in Hydra, whatever its path."""
UNSET = "???"
"""Hydra's mark of a mandatory value that is not given."""
READER_GROUPS = groups_of_reader(LaunchConfig)
"""Groups whose files are not looked for beside a recipe."""
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_MAX_BYTES, _MAX_FILES = 1_000_000, 1000
"""Of one file, and of all that the defaults lists of a recipe name."""
_FIX = "Write `defaults: [/base, override /model: tiny, _self_]`."


@dataclass(frozen=True, kw_only=True)
class Document:
    """One YAML file: its values, and the source of each by its path inside the file."""

    label: str
    header: Mapping[str, str | None]
    values: dict[str, Any]
    marks: Mapping[str, Source]
    is_recipe: bool
    """Whether its values are somebody's own: not those of a group's file or of the launcher, nor those of a
    file that extends nothing, which has to set everything."""

    @property
    def chosen_groups(self) -> list[str]:
        """The groups of which its defaults list chooses the file."""
        entries = [entry for entry in self.values.get("defaults", ()) if isinstance(entry, Mapping)]
        return [key.removeprefix("override ").strip("/ ") for entry in entries for key in entry]


class Folder(FileConfigSource):
    """A folder of YAML files, or with ``only`` a single one under the name `PRIMARY`.

    ``is_foreign``: it came with a recipe, and is neither the launcher's nor the reader's own.
    """

    def __init__(
        self, folder: Path, label: str, only: Path | None = None, *, is_foreign: bool = False
    ) -> None:
        super().__init__(provider=label, path=f"{self.scheme()}://{folder}")
        self.folder, self.label, self.only = folder, label, only
        self.is_foreign = is_foreign
        self.is_shipped = folder.resolve() == resources.folder("conf").resolve()
        self.documents: dict[str, Document] = {}

    def load_config(self, config_path: str) -> ConfigResult:
        """Reads a file, and keeps the sources of its values."""
        file = self.file(config_path)
        label = str(Path(self.label, file.relative_to(self.folder)))
        if config_path == BASE and not self.is_shipped:
            rule = f"{label} has the name of the launcher's own base, which chooses a file of every group"
            raise ConfigError([Fault("defaults", f"/{BASE}", rule, "Rename it, and where it is extended.")])
        if self.is_shipped:
            document, pickled = _shipped(file, label, file.stat().st_mtime_ns)
            config = pickle.loads(pickled)  # noqa: S301 (pickled by this process, from its own file)
        else:
            document = read_document(file, label, is_own="/" not in config_path)
            config = OmegaConf.create(document.values)
        self.documents[config_path] = document
        package = document.header.get("package")
        if self.only and package not in (None, "_global_"):
            raise LauncherError(
                f"{label}: its line `# @package {package}` puts its settings below {package}. Remove it."
            )
        return ConfigResult(
            provider=self.provider, path=self.path, config=config, header=dict(document.header)
        )

    def file(self, config_path: str) -> Path:
        """The file of a config, whether or not it exists."""
        if self.only:
            return self.only if config_path == PRIMARY else self.folder / UNSET
        return self.folder / f"{config_path.removesuffix(SUFFIX)}{SUFFIX}"

    def is_config(self, config_path: str) -> bool:
        """Whether the file exists, and is for this folder to have."""
        file = self.file(config_path)
        return self._may_have(config_path, file) and file.is_file()

    def is_group(self, config_path: str) -> bool:
        """Whether the group's folder exists, and is for this folder to have."""
        folder = self.folder / config_path
        return not self.only and self._may_have(config_path, folder) and folder.is_dir()

    def _may_have(self, config_path: str, file: Path) -> bool:
        """Of a folder that came with a recipe: no group of the reader, and nothing outside, nor by a link."""
        if ".." in config_path.split("/") or config_path.startswith("/"):
            return False
        if not self.is_foreign or self.only:
            return True
        is_of_reader = config_path.partition("/")[0] in READER_GROUPS
        return not is_of_reader and file.resolve().is_relative_to(self.folder.resolve())


class _Repository(CachingConfigRepository):
    """The files of one recipe, counted as often as its defaults lists name them: a file that names the next
    one twice doubles what comes after."""

    def __init__(self, files: IConfigRepository, recipe: Recipe) -> None:
        super().__init__(files)
        self._recipe, self._num_files = recipe, 0

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Reads a file, once.

        Raises:
            LauncherError: when there are too many.
        """
        self._num_files += 1
        if self._num_files > _MAX_FILES:
            rule = (
                f"its defaults lists name more than {_MAX_FILES} files, each counted as often as it is named"
            )
            raise LauncherError(f"{self._recipe.path}: {rule}. Name fewer.")
        return super().load_config(config_path)


@cache
def _shipped(file: Path, label: str, changed_ns: int) -> tuple[Document, bytes]:
    """One of the launcher's own files, and its values, which Hydra changes. Pickled, they are copied in a
    tenth of the time, and the points of a sweep are composed of the same files."""
    document = read_document(file, label, is_own=False)
    return document, pickle.dumps(OmegaConf.create(document.values))


def read_document(file: Path, label: str, *, is_own: bool) -> Document:
    """Reads one file. ``is_own``: it is a recipe, not a file of a group or the launcher's own.

    Raises:
        LauncherError: when it is not YAML, or uses what recipes may not.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise LauncherError(
                f"{label}: holds more than {_MAX_BYTES:,} bytes, which no recipe does. Shorten it."
            )
        text = content.decode()
        node = yaml.compose(text, Loader=_LOADER)
        header = ConfigSource._get_header_dict(text[:512])
        reader = NodeReader(label)
        values = {} if node is None else reader.read(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise LauncherError(f"{label}{line}: not YAML: {_yaml_problem(error, text)}") from error
    except (OSError, ValueError) as error:
        is_binary = isinstance(error, UnicodeDecodeError)
        reason = "not UTF-8 text" if is_binary else getattr(error, "strerror", error)
        raise LauncherError(f"{label}: cannot be read: {reason}") from error
    except RecursionError as error:
        raise LauncherError(f"{label}: is nested too deeply") from error
    if not isinstance(values, dict):
        found = "a list" if isinstance(values, list) else "a single value"
        raise LauncherError(f"{label}: must consist of key: value lines, not {found}")
    if faults := [*reader.faults, *defaults_faults(values, reader.marks)]:
        raise ConfigError(faults)
    return Document(
        label=label,
        header=header,
        values=values,
        marks=reader.marks,
        is_recipe=is_own and "defaults" in values,
    )


def _yaml_problem(error: yaml.YAMLError, text: str) -> str:
    """What is wrong with a text that is not YAML, and what to write instead where that is known."""
    problem, context = (str(getattr(error, name, None) or "") for name in ("problem", "context"))
    mark: Any = getattr(error, "problem_mark", None)
    line = text.splitlines()[mark.line : mark.line + 1] if mark else []
    letter = line[0][mark.column : mark.column + 1] if line else ""
    if letter == "\t" or (line and "\t" in line[0][: -len(line[0].lstrip()) or None]):
        return "it has a tab, and YAML is indented by spaces. Replace the tab by spaces."
    if "alias" in context + problem:
        return 'a * in front makes an alias of a text. Write a text like *.txt in quotes: "*.txt".'
    if "cannot start any token" in problem:
        return f"a text cannot begin with {letter}. Write it in quotes."
    if "escape" in problem:
        return "in double quotes a \\ begins an escape. Write the text in single quotes."
    if "mapping values are not allowed" in problem:
        if ":" not in line[0][: mark.column]:
            return "it is indented further than the line before. Give both the same indentation."
        return "a second colon in one line. Write a text that holds one in quotes."
    return problem or str(error)


def repository(recipe: Recipe) -> CachingConfigRepository:
    """Search order: the recipe, its folder, the shipped recipes and groups; the first file found is used.

    The user's own folder comes last, so that its files never replace shipped ones.
    """
    shipped = [resources.folder("recipes"), resources.folder("conf")]
    home, is_foreign = recipe.path.parent, bool(recipe.foreign_folders)
    searched = [Folder(folder, folder.name) for folder in shipped]
    if home.resolve() != shipped[0].resolve():
        searched.insert(0, Folder(home, str(home), is_foreign=is_foreign))
    searched.append(Folder(resources.user_folder(), str(resources.user_folder())))
    found = ConfigRepository(ConfigSearchPathImpl())
    primary = Folder(home, searched[0].label, only=recipe.path, is_foreign=is_foreign)
    found.sources = [primary, *searched, StructuredConfigSource("schema", "structured://")]
    return _Repository(found, recipe)


def folders(files: CachingConfigRepository) -> list[Folder]:
    """The folders that are searched, in order."""
    return [source for source in files.get_sources() if isinstance(source, Folder)]


def choices(files: CachingConfigRepository, group: str) -> list[str]:
    """The files of a group; of the root group those that a defaults list can name."""
    return [
        name for name in files.get_group_options(group, ObjectType.CONFIG) if not name.startswith(("_", "<"))
    ]


def hidden_files(files: CachingConfigRepository) -> Iterator[str]:
    """Notes: which file is used where two have the same name."""
    for used in folders(files):
        for config_path, document in used.documents.items():
            for other in folders(files):
                if other is not used and other.is_config(config_path):
                    yield f"{document.label} is used and hides {Path(other.label, config_path)}{SUFFIX}"


def line_of_default(name: str, files: CachingConfigRepository) -> str:
    """File and line of the defaults entry that names a group or a file."""
    for document in (document for folder in folders(files) for document in folder.documents.values()):
        for path, source in document.marks.items():
            words = (path.rpartition("/")[2], str(source.text).rpartition("/")[2])
            if path.startswith("defaults[") and name in words:
                return source.where
    return ""


def defaults_faults(values: Mapping[str, Any], marks: Mapping[str, Source]) -> Iterator[Fault]:
    """Faults of defaults entries that are neither the name of a file nor ``group: name``."""
    if "defaults" not in values:
        return
    entries = values["defaults"]
    if not isinstance(entries, list):
        yield Fault("defaults", entries, "must be a list of files", _FIX, marks["defaults"].where)
        return
    for index, entry in enumerate(entries):
        path = f"defaults[{index}]"
        if not _is_entry(entry):
            rule = "must be the name of a file, or `group: name`"
            yield Fault(path, entry, rule, _FIX, marks[path].where)
        elif any(".." in name.split("/") or "//" in name for name in _names(entry)):
            rule = "leaves the folder of the recipe, which has all of its own files"
            fix = "Copy the file beside the recipe, and give its name."
            yield Fault(path, entry, rule, fix, marks[path].where)
        elif entry in entries[:index]:
            yield Fault(path, entry, "is listed twice", "Remove one.", marks[path].where)
        elif "_self_" in entries[:index] and values.keys() > {"defaults"} and not _is_override(entry):
            rule = "comes after _self_, so its values would take the place of those that this file sets"
            yield Fault(path, entry, rule, "Put _self_ last.", marks[path].where)


def _is_override(entry: Any) -> bool:
    """Whether it chooses another file of a group, which has no place of its own."""
    return isinstance(entry, Mapping) and all(key.startswith("override ") for key in entry)


def _is_entry(entry: Any) -> bool:
    """Whether it is the name of a file, or a group with a file, a list of files, or null for none."""
    if not isinstance(entry, Mapping):
        return isinstance(entry, str)
    return len(entry) == 1 and all(isinstance(file, str) or file is None for file in _files(entry))


def _files(entry: Mapping[str, Any]) -> list[Any]:
    return [file for value in entry.values() for file in (value if isinstance(value, list) else [value])]


def _names(entry: str | Mapping[str, Any]) -> list[str]:
    """Every group and file that an entry names."""
    return [entry] if isinstance(entry, str) else [*entry, *filter(None, _files(entry))]
