"""``trireme export``: a run's newest checkpoint as a model in Hugging Face's format."""

from __future__ import annotations

import subprocess
import sys

from launcher.app.lookup import find_run
from launcher.base.errors import LauncherError
from launcher.cli.arguments import parse
from launcher.runs.store import absolute

HELP = """\
Writes the weights of a run's newest checkpoint, with their sizes, as Hugging Face's transformers library
reads them: config.json and model.safetensors, or several such files where the model is large. For the
families gpt (as GPT-2) and llama. FOLDER must be new.
"""
EXAMPLES = """\
  trireme export runs/quickstart-20250102-030405 my-model
  trireme run quickstart train.init_from=my-model      trains on from these weights
"""
_MODULE = "launcher.runtime.checkpoint.export"


def run(words: list[str]) -> int:
    """Exports a run; returns the exit code.

    Raises:
        LauncherError: when there is no such run, or the folder is there already.
    """
    rest = parse("export", words).names
    if len(rest) != 2:
        given = f"given {' '.join(rest)}" if rest else "none given"
        raise LauncherError(f"trireme export takes a run directory and a folder to write, {given}.")
    directory, folder = find_run(rest[0]), absolute(rest[1])
    if folder.exists():
        raise LauncherError(f"{folder} is there already, and is not written over: give a new folder.")
    # A process of its own: the command line does without torch.
    command = [sys.executable, "-m", _MODULE, str(directory.path), str(folder)]
    return subprocess.run(command, check=False).returncode  # noqa: S603 (our own module, no shell)
