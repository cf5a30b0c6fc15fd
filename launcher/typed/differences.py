"""In which settings two configurations differ, as plain values, whatever they are of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], parts: Iterable[str], ignored: Iterable[str] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """The settings under ``parts`` that differ in two configurations as plain values, but the ``ignored``
    ones: path and both values. One that is missing is None.

    >>> old, new = {"seed": 1, "optim": {"lr": 1.0, "beta": 2}}, {"seed": 2, "optim": {"lr": 3.0, "beta": 4}}
    >>> list(differences(old, new, ("optim", "seed"), ignored=("optim.beta",)))
    [('optim.lr', 1.0, 3.0), ('seed', 1, 2)]
    """
    for part in parts:
        yield from _differences(_at(old, part), _at(new, part), part, tuple(ignored))


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _differences(old: Any, new: Any, path: str, ignored: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    if path in ignored or old == new:
        return
    if all(isinstance(value, Mapping) for value in (old, new) if value is not None):
        old, new = old or {}, new or {}
        for key in dict.fromkeys((*old, *new)):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}", ignored)
    else:
        yield path, old, new
