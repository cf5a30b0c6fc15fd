"""The question to whoever types, before what a recipe names is run."""

from __future__ import annotations

import sys

from launcher.app.trust.question import Allow, Question, always, never
from launcher.base.redaction import escaped


def asker(*, trusts: bool) -> Allow:
    """Who decides: ``--trust``, a person at a terminal, or nobody, and then only trusted folders are run."""
    if trusts:
        return always
    return ask_person if sys.stdin.isatty() and sys.stderr.isatty() else never


def ask_person(question: Question) -> bool:
    """Shows what would be run or read, and asks whether to trust the recipe's folder; remembers a yes."""
    from launcher.app.trust.store import is_wide, memory_problem, remember  # few are asked anything

    folders = " and ".join(map(str, question.folders))
    _say(f"{folders}, which you have not allowed yet, names what would be run or read as you:")
    for named in question.named:
        options = f" with {named.options}" if named.options else ""
        outside = ", which is not in that folder" if named.target else ""
        _say(f"  {named.path}={named.value}{options}{outside}  [{named.where}]")
    if problem := memory_problem(question.folders):
        _say(f"note: {problem}; a yes holds for this time")
    extents = [
        f"{folder}, with {'the files directly in it' if is_wide(folder) else 'all that is below it'}"
        for folder in question.folders
    ]
    _say(f"Allow {', and '.join(extents)}, from now on? [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        return False
    try:
        if not problem:
            remember(question.folders, question.targets)
    except OSError as error:
        _say(f"note: this is not remembered: {error.filename}: {error.strerror}")
    return True


def _say(text: str, end: str = "\n") -> None:
    print(escaped(text).replace("\n", "\\n"), end=end, file=sys.stderr, flush=True)
