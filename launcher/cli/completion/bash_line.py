"""A command line as bash gives it to completion: read into words, and answered in bash's quoting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_UNSAFE = re.compile(r"[^\w@%+,./=:~-]", re.ASCII)
_ESCAPED_IN_DOUBLE = '"\\$`'
"""What a backslash escapes between double quotes; before other characters it stands for itself."""


@dataclass
class Line:
    """The words up to the cursor."""

    words: list[str]
    """Unquoted; the last is the one at the cursor, "" where a new one begins."""
    kept: int = 0
    """Characters at the start of the last word that bash leaves as they are typed."""
    quote: str = ""
    """The quotation mark that is open at the cursor."""


def read_line(text: str, breaks: str = "=:") -> Line:
    r"""Reads words as bash does: quotes, backslashes, blanks. Nothing is expanded.

    ``breaks`` are the characters at which bash begins a new word to complete, beside quotes and blanks.

    >>> read_line(r"trireme plan my\ run.yaml data.source='a b")
    Line(words=['trireme', 'plan', 'my run.yaml', 'data.source=a b'], kept=12, quote="'")
    """
    line = Line(words=[""])
    is_escaped, is_word = False, False
    for character in text:
        word = line.words[-1]
        if is_escaped:
            is_escaped = False
            kept = line.quote and character not in _ESCAPED_IN_DOUBLE
            line.words[-1] = f"{word}\\{character}" if kept else word + character
        elif character == "\\" and line.quote != "'":
            is_escaped = is_word = True
        elif line.quote:
            if character == line.quote:
                line.quote, line.kept = "", len(word)
            else:
                line.words[-1] += character
        elif character in "'\"":
            line.quote, line.kept, is_word = character, len(word), True
        elif character in " \t\n":
            if is_word:
                line.words.append("")
                line.kept, is_word = 0, False
        else:
            line.words[-1], is_word = word + character, True
            if character in breaks:
                line.kept = len(word) + 1
    return line


def replies(line: Line, candidates: Iterable[str]) -> Iterator[str]:
    """What bash is to put in place of the part of the last word that it replaces, quoted."""
    for candidate in candidates:
        rest = candidate[line.kept :]
        if line.quote == "'":
            yield rest.replace("'", "'\\''")
        elif line.quote:
            yield re.sub(r'["\\$`]', r"\\\g<0>", rest).replace("!", '"\\!"')  # else it recalls a command
        else:
            # A tilde at the start is that of a home folder, which only a bare one is.
            is_home = rest.startswith("~/")
            yield _UNSAFE.sub(r"\\\g<0>", rest) if is_home or rest[:1] != "~" else f"\\{rest}"
