"""The pages of the documentation, taken apart: code blocks, commands with their output, files, paths."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launcher.cli.verbs import TOPICS

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: ROOT / ("README.md" if name == "readme" else f"{name}/README.md") for name in TOPICS}
REST = "…"
"""Stands for lines that are left out, or for the rest of a line."""
_INDENT = "    "
_GOES_ON = " \\"
_FILE = re.compile(r"# ([\w-]+\.(?:py|yaml|toml))")
_SYNOPSIS = re.compile(
    r"\[RECIPE|\[key=value|\[RUN|\[TOPIC|\bRUN\b|\bRECIPE\b|\bNAME\b|\bTOPIC\b|\bVERB\b|\bFOLDER\b|\|"
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line of a page."""

    line: int
    """Line of the page."""
    words: tuple[str, ...]
    """What follows ``trireme``."""
    output: tuple[str, ...] | None = None
    """The lines that the page shows below it; None where it shows none."""


def blocks(page: str) -> Iterator[tuple[int, list[str]]]:
    """Every code block without its indent, with the line that it begins at; blank lines do not end one."""
    block: list[str] = []
    for number, line in enumerate([*page.splitlines(), "end"], 1):
        if line.startswith(_INDENT) or (block and not line):
            block.append(line.removeprefix(_INDENT))
        elif block:
            yield number - len(block), "\n".join(block).rstrip().split("\n")
            block = []


def commands(page: str) -> Iterator[Command]:
    """Every command of the code blocks, and every whole one in the text; no synopsis."""
    for start, block in blocks(page):
        prompts = [place for place, line in enumerate(block) if line.startswith("$ ")]
        for place, line in enumerate(block):
            last = next(at for at in range(place, len(block)) if not block[at].endswith(_GOES_ON))
            whole = " ".join(
                part.rstrip("\\") for part in [line.removeprefix("$ "), *block[place + 1 : last + 1]]
            )
            end = next((other for other in prompts if other > place), len(block))
            for words in _trireme(whole):
                shown = tuple(block[last + 1 : end]) if place in prompts else None
                yield Command(line=start + place, words=words, output=shown)
    for number, line in enumerate(page.splitlines(), 1):
        if not line.startswith(_INDENT):
            for code in re.findall(r"`(trireme [^`]+)`", line):
                for words in _trireme(code):
                    if len(words) > 1 + (words[0] in ("sweep", "site", "recipe", "bench")):
                        yield Command(line=number, words=words)


def synopses(page: str) -> Iterator[str]:
    """Every line of a code block that shows the form of a command."""
    for _, block in blocks(page):
        yield from (line for line in block if line.startswith("trireme ") and _SYNOPSIS.search(line))


def _trireme(line: str) -> Iterator[tuple[str, ...]]:
    for part in re.split(r"\s*(?:;|&&)\s*", line):
        if part.startswith("trireme ") and not _SYNOPSIS.search(part):
            yield tuple(shlex.split(part, comments=True)[1:])


def files(page: str) -> Iterator[tuple[str, str]]:
    """Name and text of every file that a page shows: a code block, or a part of one, below ``# NAME``."""
    for _, block in blocks(page):
        starts = [place for place, line in enumerate(block) if _FILE.fullmatch(line)]
        for start, end in pairwise([*starts, len(block)]):
            name = _FILE.fullmatch(block[start])
            lines = block[start + 1 : end]
            first_command = next(
                (at for at, line in enumerate(lines) if line.startswith("trireme ")), len(lines)
            )
            assert name, "a start is where the pattern matches"
            yield name[1], "\n".join(lines[:first_command]).strip() + "\n"


def matches(shown: Sequence[str], real: str) -> bool:
    """Whether a real output is what a page shows, in which ``…`` stands for anything.

    >>> matches(["a", "…", "d e…"], "a\\nb\\nc\\nd e f\\n"), matches(["a", "c"], "a\\nb\\nc\\n")
    (True, False)
    """
    lines = ["" if line.strip() == REST else f"{_pattern(line)}\\n" for line in shown]
    pattern = "".join(line or r"(?:.*\n)*?" for line in lines)
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in real.splitlines())) is not None


def _pattern(line: str) -> str:
    return ".*".join(map(re.escape, line.rstrip().split(REST)))
