"""Finds plugins by their entry points. Listing reads metadata; only a named plugin is imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from launcher.base.errors import PluginError, did_you_mean

GROUPS = ("launcher.schedules", "launcher.parallels", "launcher.architectures", "launcher.executors")


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


@cache
def load(group: str, name: str) -> Any:
    """An instance of the named plugin.

    Raises:
        PluginError: when it is unknown, or fails to import (with the cause).
    """
    found = record(group, name)
    try:
        return resolve(found.target)()
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
