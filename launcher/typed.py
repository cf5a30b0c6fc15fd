"""Frozen dataclasses from plain values, strictly: one reader for recipes, plans and records.

A value's *text*, where it is known, decides what it means, so that `1e-5`, `010` or `no` mean the
same in YAML and on the command line whatever a YAML parser made of them.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from launcher.errors import Fault, did_you_mean

T = TypeVar("T")
_INT = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number, for ``Annotated``."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {"of at least": self.minimum, "above": self.above}
        words |= {"of at most": self.maximum, "below": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one value comes from."""

    where: str
    """``file.yaml:12``, or ``override parallel.tp=4``."""
    text: str | None = None
    """A scalar as it was written, unquoted; None when it was quoted or computed."""


@dataclass
class Reading:
    """Collects the faults of one reading."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def fault(self, path: str, given: Any, allowed: str, fix: str = "") -> Any:
        """Notes a fault and stands in for the value that could not be read."""
        source = self.sources.get(path)
        written = source.text if source and source.text is not None else given
        self.faults.append(Fault(path, written, allowed, fix, source.where if source else ""))
        return _MISSING


def read(cls: type[T], values: Mapping[str, Any], reading: Reading, path: str = "") -> T | None:
    """An instance of a dataclass from plain values, or None when ``reading`` has new faults."""
    before = len(reading.faults)
    value = _dataclass(cls, values, path, reading)
    return None if len(reading.faults) > before else value


def plain(value: Any) -> Any:
    """Dataclasses as dicts and tuples as lists, ready for JSON. The inverse of `read`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


@cache
def field_types(cls: type) -> dict[str, Any]:
    """The annotated type of every field."""
    return get_type_hints(cls, include_extras=True)


def _dataclass(cls: Any, values: Any, path: str, reading: Reading) -> Any:
    if not isinstance(values, Mapping):
        return reading.fault(path, values, "a group of settings", f"Give its keys: {', '.join(field_types(cls))}.")
    known = field_types(cls)
    items: dict[str, Any] = {}
    open_keys = "options" in known and "name" in known and len(known) == 2
    for key in values:
        if str(key) not in known and not open_keys:
            reading.fault(_join(path, key), values[key], "not a setting here", did_you_mean(str(key), known))
    if open_keys and "options" not in values:
        values = {"name": values.get("name", _MISSING), "options": {k: v for k, v in values.items() if k != "name"}}
        values = {key: value for key, value in values.items() if value is not _MISSING}
    for name, kind in known.items():
        if name in values:
            inner = path if open_keys and name == "options" else _join(path, name)
            items[name] = _value(kind, values[name], inner, reading)
        elif (default := _default(cls, name)) is not _MISSING:
            items[name] = default
        else:
            reading.fault(_join(path, name), "(missing)", "this setting is required", f"Give {_join(path, name)}.")
    if any(value is _MISSING for value in items.values()) or len(items) < len(known):
        return _MISSING
    return cls(**items)


def _default(cls: Any, name: str) -> Any:
    item = next(item for item in dataclasses.fields(cls) if item.name == name)
    if item.default is not dataclasses.MISSING:
        return item.default
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else _MISSING


def _value(kind: Any, value: Any, path: str, reading: Reading) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _ranged(arguments, value, path, reading)
    if origin in (Union, types.UnionType):
        return _union(arguments, value, path, reading)
    if origin is tuple:
        return _tuple(arguments, value, path, reading)
    if origin in (dict, Mapping, types.MappingProxyType) or (origin and issubclass(origin, Mapping)):
        return _mapping(arguments[1], value, path, reading)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, path, reading)
    if kind is Any:
        return value
    parsed = _scalar(kind, value, path, reading)
    return reading.fault(path, value, f"must be {describe(kind)}", _hint(kind, value)) if parsed is _MISSING else parsed


def _scalar(kind: Any, value: Any, path: str, reading: Reading) -> Any:
    """The value as ``kind``, decided by its text where that is known; _MISSING when it is not one."""
    source = reading.sources.get(path)
    text = source.text if source and source.text is not None and "${" not in source.text else None
    readers: dict[Any, Callable[[str], Any]] = {bool: _bool, int: _int, float: _float, str: str}
    if get_origin(kind) is Literal:
        written = text if text is not None else value
        return written if written in get_args(kind) and not isinstance(written, bool) else _MISSING
    if kind is type(None):
        absent = text in ("null", "~", "") if text is not None else value is None
        return None if absent else _MISSING
    if text is not None:
        return readers[kind](text)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    matches = type(value) is kind and (kind is not float or math.isfinite(value))
    return value if matches else _MISSING


def _bool(text: str) -> Any:
    return {"true": True, "false": False}.get(text, _MISSING)


def _int(text: str) -> Any:
    return int(text) if _INT.fullmatch(text) else _MISSING


def _float(text: str) -> Any:
    number = float(text) if _FLOAT.fullmatch(text) else math.inf
    return number if math.isfinite(number) else _MISSING


def _ranged(arguments: tuple[Any, ...], value: Any, path: str, reading: Reading) -> Any:
    number = _value(arguments[0], value, path, reading)
    for bounds in arguments[1:]:
        if number is not _MISSING and number not in bounds:
            return reading.fault(path, value, f"must be {describe(Annotated[arguments]) }")
    return number


def _union(arguments: tuple[Any, ...], value: Any, path: str, reading: Reading) -> Any:
    for kind in arguments:
        attempt = Reading(reading.sources)
        chosen = _value(kind, value, path, attempt)
        if not attempt.faults:
            return chosen
    given_list = isinstance(value, Sequence) and not isinstance(value, str)
    if given_list:
        for kind in arguments:
            if get_origin(kind) is tuple:
                return _value(kind, value, path, reading)
    allowed = " or ".join(describe(kind) for kind in arguments)
    return reading.fault(path, value, f"must be {allowed}", _hint(arguments[0], value))


def _tuple(arguments: tuple[Any, ...], value: Any, path: str, reading: Reading) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return reading.fault(path, value, f"must be {describe(tuple[arguments])}", "Write it in [ ].")
    kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(value):
        return reading.fault(path, value, f"must have {len(kinds)} items")
    items = [_value(kind, item, f"{path}[{place}]", reading) for place, (kind, item) in enumerate(zip(kinds, value))]
    return _MISSING if any(item is _MISSING for item in items) else tuple(items)


def _mapping(kind: Any, value: Any, path: str, reading: Reading) -> Any:
    if not isinstance(value, Mapping):
        return reading.fault(path, value, "must be a group of settings", "Write it as key: value lines.")
    items = {str(key): _value(kind, item, _join(path, key), reading) for key, item in value.items()}
    return _MISSING if any(item is _MISSING for item in items.values()) else items


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _hint(kind: Any, value: Any) -> str:
    """Why a value of the wrong type may have become what it is, and what to write."""
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if value == "None":
        return "Write null for no value."
    if get_origin(kind) is Literal:
        return did_you_mean(str(value), map(str, get_args(kind)))
    if kind is int and isinstance(value, str) and _INT.fullmatch(value):
        return "Remove the quotes."
    return ""


def describe(kind: Any) -> str:
    """A type in words.

    >>> describe(Annotated[int, Range(minimum=1)]), describe(Literal["even"])
    ('a whole number of at least 1 without leading zeros', 'even')
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = " and ".join(map(str, arguments[1:]))
        tail = " without leading zeros" if arguments[0] is int else ""
        noun = "a whole number" if arguments[0] is int else "a finite number"
        return f"{noun} {bounds}{tail}"
    if origin is Literal:
        return ", ".join(map(str, arguments[:-1])) + (" or " if arguments[:-1] else "") + str(arguments[-1])
    if origin is tuple:
        return f"a list of {describe(arguments[0]).removeprefix('a ').replace('number', 'numbers', 1)}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    return words.get(kind, "null" if kind is type(None) else "a group of settings")
