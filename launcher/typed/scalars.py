"""The meaning of one scalar (by its text where that is known, else by its exact type) and its range."""

from __future__ import annotations

import math
import re
import types
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

WRONG: Final = object()
"""Sentinel for a value that cannot be read as the expected type."""
INT = re.compile(r"[+-]?(0|[1-9][0-9]{0,18})")
"""A whole number as it is written; 19 digits fit into 64 bits."""
_LARGEST = 10**30
"""Whole numbers beyond are damage: no count of bytes or FLOPs of a run comes near."""
FLOAT = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
NO_VALUE = ("", "None", "none")
"""Texts that mean null where a text is optional."""
_NULLS = ("null", "Null", "NULL", "~", "")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


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
        if self.minimum is not None and self.maximum is not None:
            return f"from {_bound(self.minimum)} to {_bound(self.maximum)}"
        words = {"of at least": self.minimum, "above": self.above}
        words |= {"of at most": self.maximum, "below": self.below}
        return " and ".join(f"{word} {_bound(bound)}" for word, bound in words.items() if bound is not None)

    def nearest(self, value: float) -> float | None:
        """The bound that a value violates, or None where the bound itself is excluded too.

        >>> Range(minimum=1).nearest(0), Range(above=0).nearest(-1)
        (1, None)
        """
        if self.minimum is not None and value < self.minimum:
            return self.minimum
        return self.maximum if self.maximum is not None and value > self.maximum else None


@dataclass(frozen=True)
class Filled:
    """Bound of a text that is not blank, for ``Annotated``. ``None`` counts as blank: it is meant as null."""

    def __contains__(self, value: str) -> bool:
        return value.strip() not in NO_VALUE

    def __str__(self) -> str:
        return "that is neither empty nor None"


@dataclass(frozen=True)
class Ending:
    """Bound of the name of a file of some kind, for ``Annotated``."""

    suffix: str

    def __contains__(self, value: str) -> bool:
        return value.endswith(self.suffix) and value != self.suffix

    def __str__(self) -> str:
        return f"that ends in {self.suffix}"


PositiveInt = Annotated[int, Range(minimum=1)]
"""A whole number of at least 1."""
SmallInt = Annotated[int, Range(minimum=1, maximum=10_000)]
"""A whole number from 1 to 10,000: a plan may iterate over all of it."""
Size = Annotated[int, Range(minimum=1, maximum=10_000_000)]
"""A whole number from 1 to 10,000,000: a plan may search its divisors."""
NonNegativeInt = Annotated[int, Range(minimum=0)]
"""A whole number of at least 0."""
PositiveFloat = Annotated[float, Range(above=0)]
"""A finite number above 0."""
NonNegativeFloat = Annotated[float, Range(minimum=0)]
"""A finite number of at least 0."""
Fraction = Annotated[float, Range(minimum=0, maximum=1)]
"""A finite number from 0 to 1."""
Probability = Annotated[float, Range(minimum=0, below=1)]
"""A finite number from 0 up to, not including, 1."""


def scalar(text: str) -> Any:
    """What a plain (unquoted) scalar means where no type says so: null, bool, int, float or text.

    Narrower than YAML 1.1, whose readers disagree on the rest.

    >>> [scalar(text) for text in ("null", "true", "10", "1e-5", "010", "no", "12:30:00")]
    [None, True, 10, 1e-05, '010', 'no', '12:30:00']
    """
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if INT.fullmatch(text):
        return int(text)
    number = _float(text)
    return text if number is WRONG else number


def read_scalar(kind: Any, value: Any, text: str | None) -> Any:
    """A scalar as ``kind`` (bool, int, float, str, None or a ``Literal`` of texts), or `WRONG`.

    >>> read_scalar(int, 8, "010") is WRONG, read_scalar(str, False, "no"), read_scalar(float, 3, None)
    (True, 'no', 3.0)
    """
    if get_origin(kind) is Literal:
        written = value if text is None else text
        return written if isinstance(written, str) and written in get_args(kind) else WRONG
    if text is None:
        return _typed(kind, value)
    if kind is types.NoneType:
        return None if text in _NULLS else WRONG
    if kind is bool:
        return _BOOLS.get(text, WRONG)
    if kind is int:
        return int(text) if INT.fullmatch(text) else WRONG
    if kind is float:
        return _float(text)
    return WRONG if text in _NULLS else text


def describe(kind: Any) -> str:
    """A type in words.

    >>> describe(Annotated[int, Range(minimum=1)]), describe(Literal["even"])
    ('a whole number of at least 1', 'even')
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return " ".join(map(str, [describe(arguments[0]), *arguments[1:]]))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"a list of {describe(arguments[0]).removeprefix('a ').replace('number', 'numbers', 1)}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    words = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    return words.get(kind, "null" if kind is types.NoneType else "a group of settings")


def _typed(kind: Any, value: Any) -> Any:
    """A value without text, of exactly this type; an int is also accepted as a float."""
    if type(value) is int and abs(value) > _LARGEST:
        return WRONG
    if kind is float and type(value) is int:
        return float(value)
    is_kind = type(value) is kind and (kind is not float or math.isfinite(value))
    return value if is_kind else WRONG


def _bound(bound: float) -> str:
    """A whole bound in full: 1e+07 is not accepted where a whole number is asked for."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _float(text: str) -> Any:
    number = float(text) if FLOAT.fullmatch(text) else math.inf
    return number if math.isfinite(number) else WRONG
