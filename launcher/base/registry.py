"""Finds plugins by their entry points. Listing reads metadata; only a named plugin is imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from launcher.base.errors import PluginError, did_you_mean

GROUPS = (
    "launcher.schedules",
    "launcher.parallels",
    "launcher.architectures",
    "launcher.optimizers",
    "launcher.executors",
)
DISTRIBUTION = "trireme-launcher"
"""The distribution whose plugins come with the launcher."""


class Plugin:
    """A kind of plugin: its subclasses are found by the entry points of one group."""

    entry_group: ClassVar[str]
    """Entry-point group, such as ``launcher.schedules``."""
    required: ClassVar[tuple[str, ...]]
    """What a plugin of this kind has to define itself."""


Kind = TypeVar("Kind", bound=Plugin)


@dataclass(frozen=True, kw_only=True)
class PluginRecord:
    """Which plugin a plan was made with."""

    group: str
    """Entry-point group, such as ``launcher.schedules``."""
    name: str
    distribution: str
    version: str
    target: str
    """``package.module:attribute``."""

    @property
    def kind(self) -> str:
        """``schedule`` for ``launcher.schedules``."""
        return self.group.removeprefix("launcher.").removesuffix("s")


@cache
def plugins(group: str) -> Mapping[str, PluginRecord]:
    """Every installed plugin of a group by name.

    Raises:
        PluginError: when two distributions register one name.
    """
    assert group in GROUPS, f"unknown entry-point group {group!r}"
    found: dict[str, PluginRecord] = {}
    for point in metadata.entry_points(group=group):
        assert point.dist is not None, "an entry point without a distribution"
        record = PluginRecord(
            group=group,
            name=point.name,
            distribution=point.dist.name,
            version=point.dist.version,
            target=point.value,
        )
        other = found.setdefault(point.name, record)
        if other.target != record.target:
            raise PluginError(
                f"{group}: {point.name!r} is registered by {other.distribution} ({other.target}) and by "
                f"{record.distribution} ({record.target}); uninstall one of them"
            )
    return found


def declared_targets(group: str) -> Mapping[str, Sequence[Path]]:
    """What installed packages declare in a group of entry points, as ``package.module:attribute``, and the
    folders that the packages which do are installed in."""
    found: dict[str, list[Path]] = {}
    for point in metadata.entry_points(group=group):
        assert point.dist is not None, "an entry point without a distribution"
        found.setdefault(point.value, []).append(Path(str(point.dist.locate_file(""))).resolve())
    return found


def own_plugins(group: str) -> tuple[str, ...]:
    """The plugins of a group that come with the launcher, by name."""
    return tuple(sorted(name for name, found in plugins(group).items() if found.distribution == DISTRIBUTION))


def record(group: str, name: str) -> PluginRecord:
    """The record of one plugin.

    Raises:
        PluginError: when no such name is registered; names the nearest.
    """
    known = plugins(group)
    if name not in known:
        hint = did_you_mean(name, known) if known else "Is trireme-launcher installed (pip install -e .)?"
        raise PluginError(f"no plugin {name!r} in {group}. {hint}")
    return known[name]


def load(kind: type[Kind], name: str) -> Kind:
    """An instance of the named plugin, with the defaults of its kind for what it does not define.

    Raises:
        PluginError: when it is unknown, fails to import (with the cause), or lacks what its kind requires.
    """
    found: PluginRecord = record(kind.entry_group, name)
    plugin: Kind = _instance(kind, name)  # type: ignore[arg-type]
    own = type(plugin)
    if missing := [name for name in kind.required if getattr(own, name, None) is getattr(kind, name, None)]:
        raise PluginError(
            f"the {found.kind} {name!r} of {found.distribution} {found.version} has no "
            f"{' and no '.join(missing)}; see {kind.__module__}.{kind.__name__}"
        )
    return plugin


@cache
def _instance(kind: type[Plugin], name: str) -> Any:
    found = record(kind.entry_group, name)
    try:
        plugin = resolve(found.target)()
        if isinstance(plugin, kind):
            return plugin
        own = type(plugin)
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        completed = type(own.__name__, (own, kind), names)
        return completed()
    except Exception as error:
        raise PluginError(
            f"plugin {name!r} of {found.distribution} {found.version} failed to load: "
            f"{type(error).__name__}: {error}"
        ) from error


def resolve(dotted: str) -> Any:
    """The object at ``package.module:attribute``.

    Raises:
        PluginError: when the text has another form.
    """
    module, colon, attribute = dotted.partition(":")
    if not colon or not module or not attribute:
        raise PluginError(f"{dotted!r} is not package.module:attribute")
    return getattr(importlib.import_module(module), attribute)


def verify(recorded: PluginRecord) -> None:
    """Checks that a plan's plugin is the one installed here.

    Raises:
        PluginError: when distribution, version or target differ.
    """
    here = record(recorded.group, recorded.name)
    if here != recorded:
        raise PluginError(
            f"the plan was made with {recorded.name!r} from {recorded.distribution} {recorded.version} "
            f"({recorded.target}); here it is {here.distribution} {here.version} ({here.target})"
        )
