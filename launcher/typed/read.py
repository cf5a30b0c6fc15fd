"""Frozen dataclasses from plain values, strictly: one reader for recipes, plans and records.

Where a value's *text* is known, it decides what the value means: `1e-5`, `010` or `no` mean the same in
YAML and on the command line, whatever a YAML parser would make of them.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from launcher.base.errors import LEFT_OUT, ConfigError, Fault, did_you_mean, nearest
from launcher.typed.hints import Hint, hint
from launcher.typed.scalars import NO_VALUE, WRONG, describe, read_scalar

T = TypeVar("T")
MISSING: Final = "(missing)"
"""Shown in a fault as the value of a missing setting."""
UNKNOWN: Final = "not a setting here"
"""The rule in the fault of an unknown key."""
REST: Final[Mapping[str, bool]] = {"rest": True}
"""Metadata of the field that collects every key without a field of its own."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """When a setting is read, by the values of others."""

    paths: tuple[str, ...]
    """Config paths of the others."""
    is_read: Callable[..., bool]
    """Tells it by their values, in this order."""
    text: str
    """When it is read, or when it is not, as a reader of the settings is told."""
    offered: tuple[Any, ...] = ()
    """Values of a single other one under which it is read, where they can be listed."""
    neutral: Any = None
    """A value that says itself that nothing is done, so that it may be given anywhere."""

    def __str__(self) -> str:
        return f"Read {self.text}."


Conditions = Mapping[str, tuple[Condition, ...]]
"""Metadata of a field that is not always read."""


def read_while(path: str, *values: Any, neutral: Any = None) -> Conditions:
    """A field that is read only while the setting at ``path`` has one of the values."""
    text = f"while ``{path}`` is {_either(values)}"
    is_read = values.__contains__
    return _condition(Condition(paths=(path,), is_read=is_read, text=text, offered=values, neutral=neutral))


def read_unless(path: str, *values: Any, neutral: Any = None) -> Conditions:
    """A field that is not read while the setting at ``path`` has one of the values."""
    text = f"unless ``{path}`` is {_either(values)}"
    return _condition(
        Condition(paths=(path,), is_read=lambda value: value not in values, text=text, neutral=neutral)
    )


def read_where(text: str, is_read: Callable[..., bool], *paths: str, neutral: Any = None) -> Conditions:
    """A field that is read only where ``is_read`` says so of the values at ``paths``, which ``text`` tells as
    in ``several ranks share a node``. While one of them is open (null, ``auto``), it counts as read."""

    def is_open_or_read(*values: Any) -> bool:
        return None in values or "auto" in values or is_read(*values)

    return _condition(Condition(paths=paths, is_read=is_open_or_read, text=f"where {text}", neutral=neutral))


def read_if(*all_of: Conditions) -> Conditions:
    """A field that is read only where each condition holds."""
    return {"read": tuple(condition for one in all_of for condition in one["read"])}


def conditions_of(item: dataclasses.Field[Any]) -> tuple[Condition, ...]:
    """When a field is read; none: always."""
    declared: tuple[Condition, ...] = item.metadata.get("read", ())
    return declared


def _condition(condition: Condition) -> Conditions:
    return {"read": (condition,)}


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(map(condition_value, values))


def condition_value(value: Any) -> str:
    """A value of a setting on which another depends, in words.

    >>> condition_value(None), condition_value(()), condition_value(True)
    ('null', 'empty', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else "empty" if value == () else str(value)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one value comes from."""

    where: str
    """``file.yaml:12``, or ``override parallel.tp=4``."""
    text: str | None = None
    """A scalar as it was written, unquoted; None when it was quoted or computed."""
    is_given: bool = False
    """Whether a recipe or an override sets it; False: it comes with the choice of a group's file."""
    layer: int = 0
    """Place of the recipe or the override that sets it, or that chooses the file it comes with, in the order
    of precedence; 0: the launcher's own choice."""


NO_SOURCES: Mapping[str, Source] = types.MappingProxyType({})
"""Where nothing is known of it."""


@dataclass
class Reading:
    """Collects faults while values are read."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """What was read as text, by config path: as it was typed, even where it looks like a number."""

    def fault(
        self, path: str, given: Any, allowed: str, fix: str = "", ways: tuple[Mapping[str, Any], ...] = ()
    ) -> Any:
        """Records a fault; returns the sentinel for a value that could not be read."""
        source = self.sources.get(path)
        written = source.text if source and source.text is not None else given
        where = source.where if source else ""
        self.faults.append(Fault(path, written, allowed, fix, where, ways=ways))
        return WRONG

    def text(self, path: str) -> str | None:
        """The text of a scalar, where it decides what the value means."""
        source = self.sources.get(path)
        return source.text if source else None


def read(cls: type[T], values: Mapping[str, Any], reading: Reading, path: str = "") -> T | None:
    """An instance of a dataclass from plain values, or None when ``reading`` has new faults."""
    before = len(reading.faults)
    value = _dataclass(cls, values, path, reading)
    return None if len(reading.faults) > before else value


def read_or_raise(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """An instance of a dataclass from plain values.

    Raises:
        ConfigError: with every fault.
    """
    reading = Reading()
    value = read(cls, values, reading, path)
    if value is None:
        raise ConfigError(reading.faults)
    return value


def read_fields(cls: type, values: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """Those fields of a dataclass that can be read from plain values, by name."""
    return {name: value for name, value in _fields(cls, values, "", reading).items() if value is not WRONG}


def plain(value: Any) -> Any:
    """Dataclasses as dicts and tuples as lists, ready for JSON. The inverse of `read`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(_plain_fields(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


@cache
def field_types(cls: type) -> dict[str, Any]:
    """The annotated type of every field."""
    return get_type_hints(cls, include_extras=True)


def _plain_fields(value: Any) -> Iterator[tuple[str, Any]]:
    for item in dataclasses.fields(value):
        inner = plain(getattr(value, item.name))
        if item.metadata == REST:
            yield from inner.items()
        else:
            yield item.name, inner


def _dataclass(cls: Any, values: Any, path: str, reading: Reading) -> Any:
    if not isinstance(values, Mapping):
        names = ", ".join(item.name for item in dataclasses.fields(cls))
        return reading.fault(path, values, "must be a group of settings", f"Give its keys: {names}.")
    items = _fields(cls, values, path, reading)
    return WRONG if any(value is WRONG for value in items.values()) else cls(**items)


def _fields(cls: Any, values: Mapping[str, Any], path: str, reading: Reading) -> dict[str, Any]:
    """The value of every field, `WRONG` for one that cannot be read."""
    known = {item.name: item for item in dataclasses.fields(cls)}
    rest = next((name for name, item in known.items() if item.metadata == REST), None)
    extra = {str(key): item for key, item in values.items() if key not in known or key == rest}
    items: dict[str, Any] = {} if rest is None else {rest: extra}
    for key in extra if rest is None else ():
        reading.fault(join(path, key), extra[key], UNKNOWN, *_meant(cls, path, key, extra[key]))
    for name, item in known.items():
        if name != rest:
            items[name] = _field(item, field_types(cls)[name], values, path, reading)
    return items


def _meant(cls: Any, path: str, key: str, value: Any) -> Hint:
    """The setting that an unknown one is meant to be: of the group, or of one of its groups."""
    known = field_types(cls)
    groups = {name: getattr(kind, "__dataclass_fields__", ()) for name, kind in known.items()}
    inner = [join(name, key) for name, fields in groups.items() if key in fields]
    near = nearest(key, known) or (inner[0] if len(inner) == 1 else None)
    if near is None:
        return did_you_mean(key, known), ()
    return f"Did you mean {near}?", ({join(path, key): LEFT_OUT, join(path, near): value},)


def _field(
    item: dataclasses.Field[Any], kind: Any, values: Mapping[str, Any], path: str, reading: Reading
) -> Any:
    inner = join(path, item.name)
    if item.name in values:
        return _value(kind, values[item.name], inner, reading)
    if item.default is not dataclasses.MISSING:
        return item.default
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return reading.fault(inner, MISSING, "this setting is required", f"Give {inner}{_example(kind)}.")


def _value(kind: Any, value: Any, path: str, reading: Reading) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _union(get_args(kind), value, path, reading)
    if origin is tuple:
        return _tuple(kind, value, path, reading)
    if _is_mapping(kind):
        return _mapping(get_args(kind)[1], value, path, reading)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, path, reading)
    if kind is Any:
        return value
    text = reading.text(path)
    base, *bounds = get_args(kind) if origin is Annotated else (kind,)
    parsed = read_scalar(base, value, text)
    if parsed is WRONG or any(parsed not in bound for bound in bounds):
        return reading.fault(path, value, f"must be {describe(kind)}", *hint(path, (kind,), value, text))
    if base is str:
        reading.texts[path] = parsed
    return parsed


def _union(kinds: Sequence[Any], value: Any, path: str, reading: Reading) -> Any:
    written = reading.text(path) if isinstance(value, str) and value else value
    if types.NoneType in kinds and str in kinds and written in NO_VALUE:
        why = f"{written} is a text only in quotes" if written else "this one is empty"
        fix, ways = "Write null for no value.", ({path: None},)
        return reading.fault(path, value, f"must be text or null, and {why}", fix, ways)
    # `null` is no value before it is a text, so None is tried first.
    for kind in sorted(kinds, key=lambda kind: kind is not types.NoneType):
        attempt = Reading(reading.sources)
        chosen = _value(kind, value, path, attempt)
        if not attempt.faults:
            reading.texts |= attempt.texts
            return chosen
    for kind in kinds:
        if _takes(kind, value):
            return _value(kind, value, path, reading)
    allowed = " or ".join(describe(kind) for kind in kinds)
    return reading.fault(path, value, f"must be {allowed}", *hint(path, kinds, value, reading.text(path)))


def _takes(kind: Any, value: Any) -> bool:
    """Whether the value has the shape of the kind (list or group), so that its inner faults say more."""
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple)
    return isinstance(value, Mapping) and (_is_mapping(kind) or dataclasses.is_dataclass(kind))


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _tuple(kind: Any, value: Any, path: str, reading: Reading) -> Any:
    arguments = get_args(kind)
    if not isinstance(value, Sequence) or isinstance(value, str):
        ways = ({path: [value]},) if len(arguments) == 1 or arguments[-1] is Ellipsis else ()
        return reading.fault(path, value, f"must be {describe(kind)}", "Write it in [ ].", ways)
    kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(value):
        fix = f"Give {len(kinds)} items in [ ]."
        return reading.fault(path, value, f"must have {len(kinds)} items, not {len(value)}", fix)
    pairs = enumerate(zip(kinds, value, strict=True))
    items = [_value(inner, item, f"{path}[{index}]", reading) for index, (inner, item) in pairs]
    return WRONG if any(item is WRONG for item in items) else tuple(items)


def _mapping(kind: Any, value: Any, path: str, reading: Reading) -> Any:
    if not isinstance(value, Mapping):
        return reading.fault(path, value, "must be a group of settings", "Write it as key: value lines.")
    items = {str(key): _value(kind, item, join(path, key), reading) for key, item in value.items()}
    return WRONG if any(item is WRONG for item in items.values()) else items


def join(path: str, key: Any) -> str:
    """A config path below another.

    >>> join("optim", "betas"), join("optim.betas", "[0]"), join("", "name")
    ('optim.betas', 'optim.betas[0]', 'name')
    """
    inner = str(key)
    return f"{path}.{inner}" if path and inner and not inner.startswith("[") else path + inner


def _example(kind: Any) -> str:
    """An example of a missing scalar, as ``=NUMBER``; empty for a group or a list."""
    if types.NoneType in get_args(kind):
        (first, *_) = (one for one in get_args(kind) if one is not types.NoneType)
        return f"{_example(first)}, or null for no value"
    base = get_args(kind)[0] if get_origin(kind) in (Annotated, Union, types.UnionType) else kind
    base = get_args(base)[0] if get_origin(base) is Annotated else base
    if get_origin(base) is Literal:
        return f"={'|'.join(map(str, get_args(base)))}"
    return {int: "=NUMBER", float: "=NUMBER", bool: "=true|false", str: "=TEXT"}.get(base, "")
