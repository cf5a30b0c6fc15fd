"""Every setting of the schema and of the plugins in use, and other values for each."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from launcher.config.load import plugin_options
from launcher.contract.config import LaunchConfig
from launcher.typed.read import REST, field_types, join, plain


def every_setting(cls: type = LaunchConfig, path: str = "") -> Iterator[tuple[str, Any, type]]:
    """Config path, type and class of every setting but the options of plugins."""
    for item in dataclasses.fields(cls):
        kind, inner = field_types(cls)[item.name], join(path, item.name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from every_setting(kind, inner)
        elif item.metadata != REST:
            yield inner, kind, cls


def settings_of(config: LaunchConfig) -> Iterator[tuple[str, Any, type]]:
    """The same with the options of the plugins that a configuration names."""
    yield from every_setting()
    for path, cls, _ in plugin_options(plain(config)):
        yield from every_setting(cls, path)


def other_values(kind: Any, value: Any) -> Iterator[Any]:
    """Some values of a type that a setting could have in place of its own, near it."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        for one in get_args(kind):
            yield from other_values(one, value)
    elif origin is Annotated:
        base, *bounds = get_args(kind)
        yield from (other for other in other_values(base, value) if all(other in bound for bound in bounds))
    elif origin is Literal:
        yield from (other for other in get_args(kind) if other != value)
    else:
        yield from (other for other in _near(kind, value) if other != value)


def _near(kind: Any, value: Any) -> tuple[Any, ...]:
    number = value if isinstance(value, int | float) else 2
    return {
        types.NoneType: (None,),
        bool: (True, False),
        int: (int(number * 2), int(number) + 1, 1, 0),
        float: (number * 2.0, number / 2, 0.5),
        str: (f"{value}x",),
    }.get(kind, ())
