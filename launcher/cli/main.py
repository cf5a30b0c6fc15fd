"""``trireme VERB ...``: finds the verb, runs it, and reports errors as plain text."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Sequence

from launcher.base.errors import LauncherError, did_you_mean
from launcher.base.redaction import escaped, hide_secrets
from launcher.cli.arguments import help_text, is_override, parse, unknown_flag
from launcher.cli.terminal import protect_output
from launcher.cli.verbs import VERBS
from launcher.config.recipes import shipped

_WIDTH = max(map(len, VERBS))

HELP = f"""\
trireme VERB [RECIPE] [key=value ...] [--flags]

Plans, starts and explains training across many devices, from one recipe.

{chr(10).join(f"  {name:{_WIDTH}}  {verb.line}" for name, verb in VERBS.items())}

RECIPE is a shipped name or the path of a YAML file; without one it is quickstart.
key=value overrides a setting of the recipe, such as parallel.pp=2 or model=gpt2_124m.

  trireme run quickstart
  trireme plan quickstart parallel.pp=4
  trireme recipe show quickstart
  trireme VERB --help
  trireme help TOPIC

The exit code is 0 when it is done, 1 when a run or a check failed, 2 when what was asked for is wrong or
cannot be done here, and 130 after Ctrl-C.
"""

EXIT_FAULT = 2
"""What was asked for is wrong, or cannot be done here."""
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_HELP_FLAGS = ("-h", "--help")
ANSWER = "__complete"
"""What the scripts of shell completion ask with."""


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
    name, *rest = words
    if name in ("--version", "-V", "version"):
        from importlib import metadata  # takes 20 ms

        print(f"trireme {metadata.version('trireme-launcher')}")
        return 0
    if name == "help":
        topic, *rest = [word for word in rest if word not in _HELP_FLAGS] or [""]
        if topic in VERBS:
            return run_verb(topic, ["--help"])
        from launcher.cli.help import show_topic

        if not topic:
            print(HELP)
        show_topic(topic, " ".join(rest))
        return 0
    if name == ANSWER:
        from launcher.cli.completion.completion import answer

        return answer(rest)
    if name not in VERBS:
        raise LauncherError(_unknown_verb(words))
    return run_verb(name, rest)


def run_verb(name: str, words: Sequence[str]) -> int:
    """Runs a verb, or with ``--help`` shows its help; returns the exit code.

    Raises:
        LauncherError: when the words are wrong, or what is asked for cannot be done.
    """
    verb = getattr(importlib.import_module(f"launcher.cli.{VERBS[name].module}"), name)
    if any(word in _HELP_FLAGS for word in words):
        print(help_text(name, verb), end="")
        return 0
    code: int = verb(parse(name, words))
    return code


def _unknown_verb(words: Sequence[str]) -> str:
    word = words[0]
    if word.startswith("-"):
        return unknown_flag(word, ["version"], words)
    if word.endswith((".yaml", ".yml")) or word in shipped() or is_override(word):
        return f"unknown verb {word!r}. Did you mean: trireme run {shlex.join(words)}?"
    return f"unknown verb {word!r}. {did_you_mean(word, VERBS)}"
