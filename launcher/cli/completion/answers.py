"""What may stand at the cursor of a command line."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import pairwise

from launcher.base.redaction import escaped
from launcher.cli.arguments import is_override
from launcher.cli.completion import files, settings
from launcher.cli.verbs import TOPICS, VERBS, Verb

_ENDINGS = (".yaml", ".yml")


def answers(words: Sequence[str]) -> list[files.Candidate]:
    """The words that ``words[-1]`` can become, each with what it means.

    ``words`` are those behind ``trireme``, up to the cursor. A name with a control character, or that is no
    text, is never offered: it could change what the terminal shows, or be taken for several names.

    >>> [word for word, _ in answers(["recipe", "s"])]
    ['show']
    """
    *before, word = words or [""]
    found = dict(_candidates(before, word))
    return [
        (text, escaped(told).replace("\t", "\\t"))
        for text, told in found.items()
        if text.startswith(word) and text.isprintable()
    ]


def _candidates(before: Sequence[str], word: str) -> Iterator[files.Candidate]:
    if not before:
        yield from ((name, verb.line) for name, verb in VERBS.items())
        yield "help", "a page of the documentation, or the help of a verb"
        yield from (("--help", "the verbs"), ("--version", "the version")) if word else ()
        return
    name, *rest = before
    if name == "help" and not rest:
        yield from ({name: verb.line for name, verb in VERBS.items()} | TOPICS).items()
    verb, action = VERBS.get(name), ""
    if verb is None:
        return
    if verb.actions:
        if not rest:
            yield from ((known, "") for known in verb.actions)
            return
        action, *rest = rest
        if action not in verb.actions:
            return
    yield from _arguments(verb, action, rest, word)


def _arguments(verb: Verb, action: str, before: Sequence[str], word: str) -> Iterator[files.Candidate]:
    """The words behind the verb and its action."""
    flags = verb.flags_of(action)
    values = {f"--{flag.name}": flag.value for flag in flags if flag.value}
    option, equals, value = word.partition("=")
    if before and before[-1] in values:
        yield from _of_kind(values[before[-1]], word)
    elif equals and option in values:
        yield from ((f"{option}={found}", told) for found, told in _of_kind(values[option], value))
    elif word.startswith("-"):
        used = {given.partition("=")[0] for given in before}
        yield from ((f"--{flag.name}", flag.help) for flag in flags if f"--{flag.name}" not in used)
        yield "--help", "what the verb does"
    else:
        yield from _words(verb, action, _without_flags(before, values), word)


def _words(verb: Verb, action: str, before: Sequence[str], word: str) -> Iterator[files.Candidate]:
    """Plain words and settings, as the usage names them."""
    usage, groups = verb.words_of(action), verb.groups_of(action)
    takes_settings = "key=value" in usage
    given = [item for item in before if takes_settings and is_override(item)]
    names = [item for item in before if item not in given]
    kinds = [kind.strip("[]") for kind in usage.split() if "=" not in kind and "..." not in kind]
    if len(names) < len(kinds) or "RUN ..." in usage:
        yield from _of_kind(kinds[min(len(names), len(kinds) - 1)], word)
    if takes_settings:
        recipe = next((item for item in names if item.endswith(_ENDINGS)), "")
        for found in settings.settings(word, given, recipe):
            if not groups or found[0].lstrip("+~").startswith(groups):
                yield found


def _of_kind(kind: str, word: str) -> Iterator[files.Candidate]:
    """What a word of the usage stands for: RECIPE, RUN, FILE; or the allowed words themselves."""
    kind = kind.partition("[")[0]
    if kind == "RECIPE":
        yield from settings.recipes()
        for path, told in files.paths(word, _ENDINGS):
            yield (f"./{path}" if is_override(path) else path), told
    elif kind in ("RUN", "SWEEP", "RUN|SWEEP"):
        yield from files.runs(word, kind.split("|"))
    elif kind == "SITE":
        yield from settings.choices("site", "")
    elif kind in ("FILE", "FOLDER", "DIR"):
        yield from files.paths(word)
    elif kind.islower():
        yield from ((choice, "") for choice in kind.split("|"))


def _without_flags(words: Sequence[str], values: Container[str]) -> list[str]:
    """The words that are neither flags nor the values of those that take one."""
    pairs = pairwise(["", *words])
    return [word for last, word in pairs if not word.startswith("-") and last not in values]
