"""What to write instead of a scalar that is not of the expected type."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args, get_origin

from launcher.base.errors import LEFT_OUT, nearest
from launcher.typed.scalars import FLOAT, INT, NO_VALUE, WRONG, Filled, Range, read_scalar

_MAX_DIGITS = 19
_PADDED = re.compile(r"[+-]?0[0-9]+")
_GROUPED = re.compile(r"[0-9]{1,3}(_[0-9]{3})+")
_YES_NO = {
    **dict.fromkeys(("on", "yes", "y", "1"), "true"),
    **dict.fromkeys(("off", "no", "n", "0"), "false"),
}


Hint = tuple[str, tuple[Mapping[str, Any], ...]]
"""A sentence, and what it says as ways out (`launcher.base.errors.Fault.ways`)."""
NO_HINT: Hint = ("", ())


def hint(path: str, kinds: Sequence[Any], value: Any, text: str | None) -> Hint:
    """What to write instead of a value that is none of the ``kinds``.

    A number is suggested only where it is the one that was written, or the bound that it violates; where
    a setting can be ``auto``, a number that it cannot be means that.

    >>> hint("seed", [int], "010", "010"), hint("seed", [int], "4", None)
    (('Write 10, without leading zeros.', ({'seed': 10},)), ('Remove the quotes.', ({'seed': '4'},)))
    """
    parts = [_split(kind) for kind in kinds]
    bases = [base for base, _ in parts]
    words = [name for base in bases if get_origin(base) is Literal for name in get_args(base)]
    written = str(value) if text is None else text
    if types.NoneType in bases and written in NO_VALUE:
        return "Write null for no value.", ({path: None},)
    if any(isinstance(bound, Filled) for _, bounds in parts for bound in bounds):
        return "Leave it out for its default.", ({path: LEFT_OUT},)
    if str in bases:
        may_be_empty = any(base is str and all("" in bound for bound in bounds) for base, bounds in parts)
        return 'Give text; for an empty one write "".' if text is not None and may_be_empty else "", ()
    numbers = [part for part in parts if part[0] in (int, float)]
    is_quoted = text is None and isinstance(value, str)
    if is_quoted and any(_is_read(*part, written) for part in numbers):
        return "Remove the quotes.", ({path: written},)
    if not is_quoted and not isinstance(value, bool):
        for base, bounds in numbers:
            found = _number_hint(path, base, bounds, written, otherwise="auto" if "auto" in words else None)
            if found != NO_HINT:
                return found
    if bool in bases and (yes_no := _YES_NO.get(written.lower())):
        return f"Write {yes_no}.", ({path: yes_no},)
    near = nearest(written, words)
    return (f"Did you mean {near}?", ({path: near},)) if near else NO_HINT


def _split(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and its bounds."""
    base, *bounds = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    return base, tuple(bounds)


def _is_read(base: Any, bounds: Sequence[Any], written: str) -> bool:
    value = read_scalar(base, None, written)
    return value is not WRONG and all(value in bound for bound in bounds)


def _number_hint(path: str, base: Any, bounds: Sequence[Any], written: str, otherwise: str | None) -> Hint:
    """``otherwise``: what to write instead of a number that is out of bounds, unless it is the bound."""
    plain = written.replace("_", "") if _GROUPED.fullmatch(written) else written
    if not (FLOAT.fullmatch(plain) or _PADDED.fullmatch(plain)):
        return NO_HINT
    number: Any = Decimal(plain)  # exact, where a float would be another number
    ranges = [bound for bound in bounds if isinstance(bound, Range)]
    broken = next((near for bound in ranges if (near := bound.nearest(number)) is not None), None)
    if broken is not None:
        return f"Write {otherwise or broken}.", ({path: otherwise or broken},)
    if base is float or any(number not in bound for bound in ranges):
        return NO_HINT
    if number.adjusted() >= _MAX_DIGITS:
        return f"A whole number has at most {_MAX_DIGITS} digits.", ()
    if number != number.to_integral_value() or INT.fullmatch(written):
        return NO_HINT
    zeros = ", without leading zeros" if _PADDED.fullmatch(written) else ""
    return f"Write {int(number)}{zeros}.", ({path: int(number)},)
