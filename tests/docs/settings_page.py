"""Writes the part of ``conf/README.md`` that lists every setting, from the schema and the files in ``conf/``.

.venv/bin/python -m tests.docs.settings_page > /tmp/page.md && mv /tmp/page.md conf/README.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_args

from launcher.base import registry
from launcher.config.compose import Composed
from launcher.contract.config import LaunchConfig, PluginChoice
from launcher.typed.read import MISSING, REST, Source, conditions_of, field_types
from launcher.typed.scalars import describe
from launcher.typed.trust import mark_of
from tests.helpers.configs import compose_sound

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "conf" / "README.md"
START = "\n## Every setting\n"
"""Where the part that is made begins; what stands before it is written by hand."""
WIDTH = 108
PLUGINS = {
    "optim": "launcher.optimizers",
    "architecture": "launcher.architectures",
    "executor": "launcher.executors",
}
"""Groups whose choices are plugins: each declares its settings in its ``Config``."""


def page() -> str:
    """The whole page: what is written by hand, then every setting."""
    written = PAGE.read_text().partition(START)[0]
    return re.sub(r"\n{3,}", "\n\n", f"{written}{chr(10).join(settings_part())}\n")


def settings_part() -> Iterator[str]:
    """Lines of all groups, in the order of the schema."""
    groups = {name: kind for name, kind in field_types(LaunchConfig).items() if is_class_of_settings(kind)}
    yield from (START.rstrip("\n"), "")
    for name in field_types(LaunchConfig):
        if name not in groups:
            yield from entry(name, LaunchConfig, name, base())
    for name, kind in groups.items():
        yield from ("", f"## {name}", "")
        if kind is not PluginChoice:
            (item,) = (item for item in dataclasses.fields(LaunchConfig) if item.name == name)
            yield from wrap(markdown(f"{inspect.getdoc(kind) or ''} {mark_of(item) or ''}".strip()))
            yield ""
        yield from choices(name)
        if kind is not PluginChoice:
            yield from entries(kind, name, base())
        if name in PLUGINS:
            yield from plugin_choices(name)
        if name == "parallel":
            yield from schedules()


def choices(group: str) -> Iterator[str]:
    """Every file of a group with its description, the default one first."""
    files = sorted((ROOT / "conf" / group).glob("*.yaml"))
    if not files:
        return
    default = default_choices()[group]
    files.sort(key=lambda path: path.stem != default)
    yield from (
        f"Choices (`{group}=NAME`; without one `{default}`, whose values are the defaults below):",
        "",
    )
    width = max(len(path.stem) for path in files)
    for path in files:
        text = f"{path.stem:{width}}  {description(path)}"
        yield from wrap(text, " " * 4, " " * (width + 6))
    yield ""


def plugin_choices(group: str) -> Iterator[str]:
    """The settings of every choice of a group of plugins."""
    yield from ("", "Settings of each choice:", "")
    for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
        config = config_class(PLUGINS[group], path.stem)
        yield from (f"### {group}={path.stem}", "")
        if config is None:
            yield from ("No settings.", "")
        else:
            yield from entries(config, group, base(f"{group}={path.stem}"))
            yield ""


def schedules() -> Iterator[str]:
    """The schedule plugins, and the options of those that have some."""
    yield from ("", "### parallel.schedule", "")
    names = sorted(registry.plugins("launcher.schedules"))
    width = max(map(len, names))
    for name in names:
        plugin = registry.resolve(registry.record("launcher.schedules", name).target)
        yield f"    {name:{width}}  {(inspect.getdoc(plugin) or '').splitlines()[0]}"
    for name in names:
        config = config_class("launcher.schedules", name)
        if config:
            yield from ("", f"### parallel.schedule={name}", "")
            yield from entries(config, "parallel.schedule_options", None)


def config_class(group: str, name: str) -> type | None:
    """The class that declares a plugin's settings."""
    return getattr(registry.resolve(registry.record(group, name).target), "Config", None)


def entries(cls: type, prefix: str, composed: Composed | None) -> Iterator[str]:
    """Every setting of a class below a config path."""
    for item in dataclasses.fields(cls):
        kind, path = field_types(cls)[item.name], f"{prefix}.{item.name}"
        if item.metadata == REST:
            continue
        if is_class_of_settings(kind):
            if conditions_of(item):
                yield from wrap(f"`{path}`: {markdown(told(cls, item))}", "- ", "  ")
            yield from entries(kind, path, composed)
            continue
        yield from entry(path, cls, item.name, composed)
        inner = path if NoneType in get_args(kind) else f"{path}.NAME"  # an optional group, or groups by name
        for part in filter(is_class_of_settings, get_args(kind)):
            yield from entries(part, inner, None)


def is_class_of_settings(kind: Any) -> bool:
    """Whether a type is a dataclass; a bound of an annotated one is an instance."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def entry(path: str, cls: type, name: str, composed: Composed | None) -> Iterator[str]:
    """One setting: its default, what it may be, what it does."""
    default = default_of(path, cls, name, composed)
    given = f"`{path}={default}`" if default else f"`{path}`"
    kind = describe(field_types(cls)[name])
    for word, plainer in {"a group of settings": "key: value pairs", "finite number": "number"}.items():
        kind = kind.replace(word, plainer)
    kind = re.sub(r"\d{5,}", lambda number: f"{int(number[0]):,}", kind)
    (item,) = (item for item in dataclasses.fields(cls) if item.name == name)
    text = f"{given} ({kind if default else f'{kind}; no default'}): {markdown(told(cls, item))}"
    yield from wrap(text, "- ", "  ")


def told(cls: type, item: dataclasses.Field[Any]) -> str:
    """What a setting does, when it is read, and what of it a recipe may say."""
    return " ".join(map(str, filter(None, (field_docs(cls)[item.name], *conditions_of(item), mark_of(item)))))


def wrap(text: str, first: str = "", rest: str = "") -> list[str]:
    """Lines of a text, none of which begins with a * that would make it an item of a list."""
    lines = textwrap.wrap(
        text.replace(" * ", "\u00a0*\u00a0"),
        WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
        initial_indent=first,
        subsequent_indent=rest,
    )
    return [line.replace("\u00a0", " ") for line in lines]


def default_of(path: str, cls: type, name: str, composed: Composed | None) -> str:
    """The default as it is typed; empty where a recipe has to give the value."""
    if composed is not None:
        found: Any = composed.values
        for key in path.split("."):
            found = found.get(key, MISSING) if isinstance(found, Mapping) else MISSING
        if found != MISSING:
            return typed(found, path, composed.sources)
    item = next(item for item in dataclasses.fields(cls) if item.name == name)
    if item.default_factory is not dataclasses.MISSING:
        return typed(item.default_factory())
    return "" if item.default is dataclasses.MISSING else typed(item.default)


def typed(value: Any, path: str = "", sources: Mapping[str, Source] = MappingProxyType({})) -> str:
    """A value as an override gives it, numbers as the file writes them."""
    if path in sources and (text := sources[path].text):
        return text
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, Mapping):
        items = (f"{key}: {typed(item, f'{path}.{key}', sources)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    return json.dumps(value)


@cache
def base(*overrides: str) -> Composed:
    """``conf/base.yaml`` alone, composed."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "RECIPE.yaml")
        recipe.write_text("defaults: [/base, _self_]\n")
        return compose_sound(str(recipe), overrides)


def default_choices() -> dict[str, str]:
    """The file of each group that ``conf/base.yaml`` chooses."""
    return dict(re.findall(r"^  - (\w+): (\w+)$", (ROOT / "conf" / "base.yaml").read_text(), re.MULTILINE))


def description(path: Path) -> str:
    """The comment that a file begins with, as one line."""
    lines = path.read_text().splitlines()
    comment = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(line.removeprefix("#").strip() for line in comment)


@cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The docstring below each field of a class, as one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef), "the source of a class is a class"
    found = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(node.target, ast.Name), "a field has a name"
            found[node.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def markdown(text: str) -> str:
    """A docstring's text: one backtick around code, one line."""
    return " ".join(text.replace("``", "`").split())


if __name__ == "__main__":
    print(page(), end="")
