"""``trireme report`` and ``trireme export``: the speedup table and the trained model of stored runs."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from launcher.app.lifecycle import unfinished_baseline
from launcher.app.lookup import DEFAULT_ROOT, find_run
from launcher.app.output import text_width
from launcher.base.errors import LauncherError
from launcher.report.speedup import compare, to_json
from launcher.report.tables import report_text
from launcher.runs.store import absolute

_EXPORT = "launcher.runtime.checkpoint.export"
_MIN_WIDTH = 72


def report(given: Namespace) -> int:
    """Shows the speedup of finished runs, and where every missing device went.

    RUN is a run directory, or its name below runs/. Runs of one layout are repeats of each other: the
    median is shown, with the smallest and the largest. Without --base each run is compared with the
    baseline that it was started with.

    Examples:
      trireme report runs/quickstart
      trireme report runs/quickstart --base runs/quickstart-baseline
      trireme report runs/a runs/b runs/c --base runs/one --json
    """
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


def export(given: Namespace) -> int:
    """Writes the weights of a run's newest checkpoint, with their sizes, as Hugging Face's transformers
    library reads them: config.json and model.safetensors, or several such files where the model is large.
    For the families gpt (as GPT-2) and llama (as Llama, Mistral, Qwen2 or Qwen3). FOLDER must be new.

    Examples:
      trireme export runs/quickstart-20250102-030405 my-model
      trireme run quickstart train.init_from=my-model      trains on from these weights
    """
    rest = given.names
    if len(rest) != 2:
        found = f"given {' '.join(rest)}" if rest else "none given"
        raise LauncherError(f"trireme export takes a run directory and a folder to write, {found}.")
    directory, folder = find_run(rest[0]), absolute(rest[1])
    if folder.exists():
        raise LauncherError(f"{folder} is there already, and is not written over: give a new folder.")
    # A process of its own: the command line does without torch.
    command = [sys.executable, "-P", "-m", _EXPORT, str(directory.path), str(folder)]
    return subprocess.run(command, check=False).returncode  # noqa: S603 (our own module, no shell)


def _found(name: str) -> Path:
    """The run of that name below `DEFAULT_ROOT`, where there is no folder of that name here."""
    below = Path(DEFAULT_ROOT) / name
    return below if not os.path.isdir(name) and os.path.isdir(below) else Path(name)
