"""``trireme help``: the README of the project and of each top folder, as plain text in the terminal."""

from __future__ import annotations

import re

from launcher.base import resources
from launcher.base.errors import LauncherError, did_you_mean
from launcher.cli.main import HELP, main
from launcher.cli.verbs import TOPICS, VERBS

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def run(words: list[str]) -> int:
    """Shows the list of topics, a page, sections of a page, or the help of a verb; returns the exit code.

    Raises:
        LauncherError: for an unknown topic or section; names the nearest.
    """
    topic, *rest = [word for word in words if word not in ("-h", "--help")] or [""]
    if not topic:
        lines = (f"  {name:9} {line}" for name, line in TOPICS.items())
        print(HELP, "trireme help TOPIC [SECTION] shows one of these pages:", "", *lines, sep="\n")
        return 0
    if topic in VERBS:
        return main([topic, "--help"])
    if topic not in TOPICS:
        raise LauncherError(f"no topic is called {topic!r}. {did_you_mean(topic, [*TOPICS, *VERBS])}")
    folder = resources.pages() if topic == "readme" else resources.pages() / topic
    text = (folder / "README.md").read_text(encoding="utf-8")
    print(as_text(sections(text, " ".join(rest)) if rest else text), end="")
    return 0


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
