"""``trireme VERB ...``: finds the verb, runs it, and reports errors as plain text."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from launcher.base.errors import LauncherError, did_you_mean
from launcher.base.redaction import escaped, hide_secrets
from launcher.cli.terminal import protect_output

VERBS = {
    "plan": "check a recipe and show what it would do: mesh, schedule, memory, traffic",
    "run": "plan, start the ranks on this machine, follow them, and report the speedup",
    "submit": "plan, freeze the code, and hand the job to Slurm",
    "sweep": "the same recipe with several values: plan, run, compare, in one table",
    "status": "how the runs stand",
    "logs": "what a run has printed",
    "wait": "follow a run to its end, and report the speedup",
    "cancel": "end a run",
    "export": "a trained model in Hugging Face's format",
    "report": "the speedup table again, from stored runs",
    "recipe": "list the recipes, or show one composed, with the origin of every value",
    "bench": "measure what plans assume: the links between devices",
    "site": "write down what is particular to a cluster, or have the cluster check it",
    "doctor": "what this machine has, and how to mend what is missing",
}
"""Every verb with its line in the help, in the order in which a newcomer meets them."""

_FOLDERS = {
    **dict.fromkeys(
        ("run", "submit", "sweep", "status", "logs", "wait", "cancel", "export", "report"), "runs"
    ),
    **dict.fromkeys(("bench", "site", "doctor"), "cluster"),
    "plan": "plans",
    "recipe": "recipes",
}
"""The package below ``launcher.cli`` that holds the module of each verb."""

HELP = f"""\
trireme VERB [RECIPE] [key=value ...] [--flags]

Plans, starts and explains training across many devices, from one recipe.

{chr(10).join(f"  {verb:8} {line}" for verb, line in VERBS.items())}

RECIPE is a shipped name or the path of a YAML file; without one it is quickstart.
key=value overrides a setting of the recipe, such as parallel.pp=2 or model=gpt2_124m.

  trireme run quickstart
  trireme plan quickstart parallel.pp=4
  trireme recipe show quickstart
  trireme VERB --help
  trireme help TOPIC
"""

EXIT_FAULT = 2
"""What was asked for is wrong, or cannot be done here."""
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_HELP_FLAGS = ("-h", "--help")


class Verb(Protocol):
    """What a module of a verb holds."""

    HELP: str

    def run(self, words: list[str]) -> int:
        """Does it; returns the exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    protect_output()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except LauncherError as error:
        for note in getattr(error, "__notes__", ()):
            print(f"note: {escaped(note)}", file=sys.stderr)
        print(escaped(hide_secrets(str(error))), file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; nobody is left to tell
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk, a folder that may not be read
        place = f"{error.filename}: " if error.filename else ""
        print(escaped(f"{place}{error.strerror or error}"), file=sys.stderr)
        _drop_output()
        return EXIT_FAULT
    return code


def _drop_output() -> None:
    """Sends what is not printed yet nowhere, so that the interpreter does not try once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in _HELP_FLAGS:
        print(HELP, end="")
        return 0
    verb, *rest = words
    if verb == "help":
        return cast(Verb, importlib.import_module("launcher.cli.help")).run(rest)
    if verb not in VERBS:
        raise LauncherError(f"unknown verb {verb!r}. {did_you_mean(verb, VERBS)}")
    module = cast(Verb, importlib.import_module(f"launcher.cli.{_FOLDERS[verb]}.{verb}"))
    if any(word in _HELP_FLAGS for word in rest):
        print(module.HELP.rstrip())
        return 0
    return module.run(rest)
