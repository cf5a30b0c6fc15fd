"""Config paths (``optim.betas[0]``): the values at them, and the source of each value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

from launcher.base.errors import LEFT_OUT
from launcher.contract.config import LaunchConfig
from launcher.typed.read import REST, Source, join
from launcher.typed.scalars import scalar


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every group, list and scalar below a value with its path, outermost first.

    >>> [path for path, _ in walk({"optim": {"betas": [0.9]}})]
    ['optim', 'optim.betas', 'optim.betas[0]']
    """
    if path:
        yield path, value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk(item, join(path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from walk(item, f"{path}[{index}]")


def mapped(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """The same groups and lists with each scalar changed, of which ``change`` is told the path."""
    if isinstance(value, Mapping):
        return {key: mapped(item, change, join(path, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change, f"{path}[{index}]") for index, item in enumerate(value)]
    return change(path, value)


def value_at(config: LaunchConfig, path: str) -> Any:
    """The value of a setting; None where a plugin's option is not given.

    Raises:
        KeyError: when there is no such setting.
    """
    return reduce(_inner, path.split("."), config)


def changed(config: LaunchConfig, values: Mapping[str, Any]) -> LaunchConfig:
    """The configuration with other values at some paths.

    Raises:
        KeyError: when there is no such setting.
    """
    for path, value in values.items():
        config = _with(config, path.split("."), value)
    return config


def replace_sources(
    sources: dict[str, Source], path: str, marks: Mapping[str, Source], *, merges: bool
) -> None:
    """Records that the value at ``path`` was replaced by one whose parts have the sources ``marks``.

    ``merges``: the value is a group, and its other keys keep their values.
    """
    if not merges:
        for stale in [known for known in sources if known.startswith((f"{path}.", f"{path}["))]:
            del sources[stale]
    for outer in accumulate(path.split(".")[:-1], join):
        # A group that was created for the value, perhaps in place of a scalar.
        if outer not in sources or sources[outer].text is not None:
            sources[outer] = dataclasses.replace(marks[""], text=None)
    sources |= {join(path, inner): source for inner, source in marks.items()}


def final_sources(
    values: Mapping[str, Any], found: Mapping[str, Source], texts: Mapping[str, str]
) -> dict[str, Source]:
    """The source of everything in ``values``, and of what was deleted from it.

    A source's text is kept only where the value is still what the text means; a value without a source of
    its own (inside an interpolated group) has its parent's. ``texts``: of values that refer to others.
    """
    final = {path: dataclasses.replace(source, text=None) for path, source in found.items()}
    for path, value in walk(values):
        outer = path.rpartition("[" if path.endswith("]") else ".")[0]
        source = found.get(path) or final.get(outer) or Source(where="")
        if path in texts and not isinstance(value, str):
            source = dataclasses.replace(source, text=texts[path])
        meaning = None if source.text is None else scalar(source.text)
        keeps_text = source.text is not None and type(meaning) is type(value) and meaning == value
        final[path] = source if keeps_text else dataclasses.replace(source, text=None)
    return final


def blamed(paths: Sequence[str], sources: Mapping[str, Source]) -> str:
    """Of several settings that contradict each other, the first that an override sets, else the first.

    >>> blamed(["batch.global_size", "batch.micro_size"], {"batch.micro_size": Source(where="override x")})
    'batch.micro_size'
    """
    overridden = (path for path in paths if path in sources and sources[path].where.startswith("override "))
    return next(overridden, paths[0])


def _inner(owner: Any, name: str) -> Any:
    if isinstance(owner, Mapping):
        return owner.get(name)
    if _is_option(owner, name):
        return owner.options.get(name)
    if name not in getattr(owner, "__dataclass_fields__", ()):
        raise KeyError(name)
    return getattr(owner, name)


def _is_option(owner: Any, name: str) -> bool:
    """Whether a setting is one of the plugin that its group names."""
    fields = getattr(owner, "__dataclass_fields__", {})
    rest = {other for other, item in fields.items() if item.metadata == REST}
    return bool(rest) and (name in rest or name not in fields)


def _with(owner: Any, names: Sequence[str], value: Any) -> Any:
    name, *rest = names
    before = _inner(owner, name)
    new = _with({} if before is None else before, rest, value) if rest else value
    if isinstance(owner, Mapping):
        others = {key: item for key, item in owner.items() if key != name}
        return others if new == LEFT_OUT else {**others, name: new}
    if _is_option(owner, name):
        return dataclasses.replace(owner, options=_with(owner.options, names, value))
    if new == LEFT_OUT:
        item = owner.__dataclass_fields__[name]
        new = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    return dataclasses.replace(owner, **{name: new})
