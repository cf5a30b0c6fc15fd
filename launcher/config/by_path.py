"""Settings by their config path: read, changed, and the one that a fault names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.contract.config import LaunchConfig, PluginChoice
from launcher.typed.read import Source


def blamed(paths: Sequence[str], sources: Mapping[str, Source]) -> str:
    """Of several settings that disagree the first that was typed as an override, else the first of all.

    >>> blamed(["batch.global_size", "batch.micro_size"], {"batch.micro_size": Source(where="override x")})
    'batch.micro_size'
    """
    typed = (path for path in paths if path in sources and sources[path].where.startswith("override "))
    return next(typed, paths[0])


def value_at(config: LaunchConfig, path: str) -> Any:
    """The value of a setting; None where a plugin's option is not given.

    Raises:
        KeyError: when there is no such setting.
    """
    value: Any = config
    for name in path.split("."):
        value = _inner(value, name)
    return value


def changed(config: LaunchConfig, values: Mapping[str, Any]) -> LaunchConfig:
    """The configuration with other values at some paths.

    Raises:
        KeyError: when there is no such setting.
    """
    for path, value in values.items():
        config = _with(config, path.split("."), value)
    return config


def _inner(owner: Any, name: str) -> Any:
    if isinstance(owner, Mapping):
        return owner.get(name)
    if isinstance(owner, PluginChoice) and name != "name":
        return owner.options.get(name)
    if name not in getattr(owner, "__dataclass_fields__", ()):
        raise KeyError(name)
    return getattr(owner, name)


def _with(owner: Any, names: Sequence[str], value: Any) -> Any:
    name, *rest = names
    before = _inner(owner, name)
    new = _with({} if before is None else before, rest, value) if rest else value
    if isinstance(owner, Mapping):
        return {**owner, name: new}
    if isinstance(owner, PluginChoice) and name != "name":
        return replace(owner, options={**owner.options, name: new})
    return replace(owner, **{name: new})
