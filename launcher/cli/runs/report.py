"""``trireme report``: the speedup table, again, from the stored records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.app.lifecycle import unfinished_baseline
from launcher.app.lookup import DEFAULT_ROOT
from launcher.app.output import text_width
from launcher.base.errors import LauncherError
from launcher.cli.arguments import parse
from launcher.report.speedup import compare, to_json
from launcher.report.tables import report_text

HELP = """\
Shows the speedup of finished runs, and where every missing device went.

RUN is a run directory, or its name below runs/. Runs of one layout are repeats of each other: the
median is shown, with the smallest and the largest. Without --base each run is compared with the
baseline that it was started with.
"""
EXAMPLES = """\
  trireme report runs/quickstart
  trireme report runs/quickstart --base runs/quickstart-baseline
  trireme report runs/a runs/b runs/c --base runs/one --json
"""
_MIN_WIDTH = 72


def run(words: Sequence[str]) -> int:
    """Prints the report of the run directories in ``words``; returns the exit code.

    Raises:
        LauncherError: no run given, or runs that cannot be read or compared.
    """
    given = parse("report", words)
    if not given.names:
        raise LauncherError("report: no run given. Give at least one run directory: trireme report RUN...")
    base = _found(given.base) if given.base else None
    paths = [_found(name) for name in given.names]
    for name, path in zip(given.names, paths, strict=True) if base is None else ():
        if problem := unfinished_baseline(path):
            raise LauncherError(f"{name}: {problem}")
    report = compare(paths, base)
    if given.json:
        print(to_json(report))
    else:
        print(report_text(report, width=max(_MIN_WIDTH, text_width())), end="")
    return 0


def _found(name: str) -> Path:
    """The run of that name below `DEFAULT_ROOT`, where there is no folder of that name here."""
    below = Path(DEFAULT_ROOT) / name
    return below if not os.path.isdir(name) and os.path.isdir(below) else Path(name)
