"""Text for terminals that cannot show every character."""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata

_HANDLER = "trireme-ascii"
_LOOKALIKES = str.maketrans(
    "─━│┌┐└┘├┤┬┴┼█░·×–µ",  # noqa: RUF001 (the characters to be replaced)
    "-=|+++++++++#..x-u",
) | {ord("→"): "->", ord("≤"): "<=", ord("≥"): ">="}


def protect_output() -> None:
    """Makes printing to stdout and stderr never fail: on a character that the encoding lacks, or because the
    caller has closed them (what is printed then goes nowhere)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for good)
    codecs.register_error(_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def to_ascii(text: str) -> str:
    """The nearest ASCII text.

    >>> to_ascii("2 → 4 é ☃")
    '2 -> 4 e ?'
    """
    return "".join(_ascii_character(character) for character in text.translate(_LOOKALIKES))


def _ascii_character(character: str) -> str:
    if character.isascii():
        return character
    if 0xDC80 <= ord(character) <= 0xDCFF:  # a byte of a file name that is not valid text
        return f"\\x{ord(character) - 0xDC00:02x}"
    folded = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return folded or "?"


def _replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "registered for output only"
    return to_ascii(error.object[error.start : error.end]), error.end
