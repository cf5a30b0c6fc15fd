"""Ways into objects for tests: to break one thing, to look at what is private, to have what may be absent."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def substitute(owner: object, name: str, other: object) -> Any:
    """Puts something in the place of an attribute for the rest of a rank, whose process ends with its test.

    Returns what was there. A name that is not there fails: such a sabotage would break nothing.
    """
    kept = getattr(owner, name)
    setattr(owner, name, other)
    return kept


def inside(thing: object) -> Any:
    """The same object, for a test that reads or changes what is private to it."""
    return thing


def there(value: T | None) -> T:
    """What may be absent elsewhere, and must be there in this test."""
    assert value is not None, "it is not there"
    return value
