"""``trireme help``: the README of the project and of each top folder, as plain text in the terminal."""

from __future__ import annotations

import re

from launcher.base import resources
from launcher.base.errors import LauncherError, did_you_mean
from launcher.cli.verbs import TOPICS, VERBS

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def show_topic(topic: str, wanted: str = "") -> None:
    """Shows a page, or its sections whose heading holds ``wanted``; without a topic the list of topics.

    Raises:
        LauncherError: for an unknown topic or section; names the nearest.
    """
    if not topic:
        lines = (f"  {name:9} {line}" for name, line in TOPICS.items())
        print("trireme help TOPIC [SECTION] shows one of these pages:", "", *lines, sep="\n")
        return
    if topic not in TOPICS:
        raise LauncherError(f"no topic is called {topic!r}. {did_you_mean(topic, [*TOPICS, *VERBS])}")
    folder = resources.pages() if topic == "readme" else resources.pages() / topic
    text = (folder / "README.md").read_text(encoding="utf-8")
    print(as_text(sections(text, wanted) if wanted else text), end="")


def sections(page: str, wanted: str) -> str:
    """The sections of a page whose heading holds a text.

    >>> sections("# Page\\n\\n## One\\n\\n1\\n\\n## Two\\n\\n2\\n", "tw")
    '## Two\\n\\n2\\n'

    Raises:
        LauncherError: where there is none; names the nearest heading.
    """
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    headings = [part.partition("\n")[0].removeprefix("## ") for part in parts]
    found = [
        part for part, heading in zip(parts, headings, strict=True) if wanted.casefold() in heading.casefold()
    ]
    if not found:
        raise LauncherError(f"no section is called {wanted!r}. {did_you_mean(wanted, headings)}")
    return "".join(found)


def as_text(page: str) -> str:
    r"""A page without its Markdown: headings underlined, links and code as their text.

    >>> as_text("## A `b`\n\n`c`, see [d](e).\n\n    $ `f`\n")
    'A b\n---\n\nc, see d.\n\n    $ `f`\n'
    """
    lines: list[str] = []
    for line in page.splitlines():
        if line.startswith("    "):  # a block of code
            lines.append(line)
            continue
        marks, _, heading = line.partition(" ")
        is_heading = marks in ("#", "##", "###")
        text = _LINK.sub(r"\1", heading if is_heading else line).replace("`", "")
        lines += [text, ("=" if marks == "#" else "-") * len(text)] if is_heading else [text]
    return "\n".join(lines) + "\n"
