"""The words after a verb, told apart by argparse: flags, settings, and plain words such as the recipe.

A flag may stand anywhere. A setting holds ``=`` or begins with one of ``+ ~ - \\``; a path may hold ``=`` or
begin with ``~``, too, when it is written from ``/``, ``./``, ``../`` or ``~/``.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from inspect import cleandoc
from itertools import pairwise
from textwrap import fill
from typing import Any

from launcher.app.lookup import beginning
from launcher.app.request import Request
from launcher.base.columns import wrapped
from launcher.base.errors import LauncherError, nearest
from launcher.cli.ask import asker
from launcher.cli.verbs import VERBS, Flag

DEFAULT_RECIPE = "quickstart"
_PATH_STARTS = ("/", "./", "../", "~/")
_OVERRIDE_STARTS = ("+", "~", "-", "\\")
_WIDTH = 104
_NEWEST = "newest"
"""The value of --resume where none is given."""
_AS_RECIPE = "A recipe is a word of its own, without the flag: {value}."
_AS_PATH = "A recipe is given by its path, such as ./FOLDER/RECIPE.yaml."
_AS_SWEEP = "Several values are a sweep: trireme sweep run RECIPE key=A,B."
_ELSEWHERE = {
    **dict.fromkeys(("config-name", "cn"), _AS_RECIPE),
    **dict.fromkeys(("config-path", "cp", "config-dir", "cd"), _AS_PATH),
    **dict.fromkeys(("multirun", "m"), _AS_SWEEP),
    "cfg": "trireme recipe show prints what a recipe says.",
    "dry-run": "trireme plan RECIPE starts nothing.",
}
"""What stands here for a flag of Hydra's own command line, or of another verb."""


class _Once(argparse.Action):
    """Keeps a flag, or its value; neither may be given twice, and no value be empty."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag = self.option_strings[-1]
        if getattr(namespace, self.dest):
            raise LauncherError(f"{flag} is given twice. Give it once.")
        if self.nargs is None and not values.strip():
            raise LauncherError(f"{flag} needs a value, given an empty one. Write {flag}=VALUE.")
        setattr(namespace, self.dest, values if self.nargs is None else True)


def parse(verb: str, words: Sequence[str]) -> argparse.Namespace:
    """What was typed after a verb.

    ``action``: that of a verb with actions, else ""; ``names``: the plain words; ``overrides``: the settings;
    ``recipe``, of what begins with a recipe; and every flag by its name: None or False where it is not given.

    >>> given = parse("plan", ["gpt", "parallel.tp=2", "--json"])
    >>> given.recipe, given.overrides, given.json, given.out
    ('gpt', ('parallel.tp=2',), True, None)

    Raises:
        LauncherError: for an action or a flag that is not known, a flag given twice, a missing or an empty
            value, a value that is not taken, and a second recipe.
    """
    actions = VERBS[verb].actions
    action = ""
    if actions:
        action, *words = words or [""]
        if action not in actions:
            raise LauncherError(_unknown_action(verb, action))
    flags, usage = VERBS[verb].flags_of(action), VERBS[verb].words_of(action)
    given, rest = split_flags(words, flags)
    takes_settings = "key=value" in usage
    given.action = action
    given.names = tuple(word for word in rest if not (takes_settings and is_override(word)))
    given.overrides = tuple(word for word in rest if takes_settings and is_override(word))
    if usage.lstrip("[").startswith("RECIPE"):
        given.recipe = one_recipe(given.names)
    return given


def split_flags(words: Sequence[str], flags: Sequence[Flag]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the other words in their order.

    Raises:
        LauncherError: as `parse`, for a flag.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in flags:
        kind: dict[str, Any] = {} if flag.value or flag.is_optional else {"nargs": 0, "default": False}
        parser.add_argument(*flag.options, action=_Once, **kind)
    alone = {option: f"{option}={_NEWEST}" for flag in flags if flag.is_optional for option in flag.options}
    for word, following in pairwise(words):
        if word in alone and following.isdecimal():
            raise LauncherError(f"{word} takes its value after =. Write {word}={following}.")
    words = [alone.get(word, word) for word in words]
    try:
        given, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        flag = next(flag for flag in flags if "/".join(flag.options) == error.argument_name)
        raise LauncherError(_wrong_value(flag, words)) from None
    for word in rest:
        if word.startswith("-"):
            raise LauncherError(unknown_flag(word, [flag.name for flag in flags], words))
    return given, rest


def one_recipe(names: Sequence[str]) -> str:
    """The recipe among the plain words; without one it is the quickstart.

    Raises:
        LauncherError: for a second one.
    """
    if len(names) > 1:
        raise LauncherError(
            f"two recipes: {names[0]!r} and {names[1]!r}. Give one; a setting is written key=value."
        )
    return names[0] if names else DEFAULT_RECIPE


def settings_of(given: argparse.Namespace) -> tuple[str, ...]:
    """The settings that were typed, and that which --from stands for.

    Raises:
        LauncherError: when there is no such checkpoint.
    """
    source = vars(given).get("from")
    typed: tuple[str, ...] = given.overrides
    return (*typed, beginning(source, typed)) if source else typed


def request(given: argparse.Namespace) -> Request:
    """What is to be started; a flag that the verb does not know is as if it was not given.

    Raises:
        LauncherError: for a number of points, or a step, that is none.
    """
    flags = vars(given)
    at_once = flags.get("at_once")
    if at_once and (not at_once.isdecimal() or int(at_once) < 1):
        raise LauncherError(f"--at-once={at_once}: must be a whole number of at least 1.")
    resume = flags.get("resume") or ""
    if resume and flags.get("from"):
        raise LauncherError(
            "--resume goes on with a run, which knows what it began with, and --from begins a new one: give "
            "one of them."
        )
    if resume not in ("", _NEWEST) and (not resume.isdecimal() or int(resume) < 1):
        raise LauncherError(f"--resume={resume}: must be the step of a checkpoint, a whole number from 1 on.")
    return Request(
        recipe=flags.get("recipe", ""),
        overrides=settings_of(given),
        resume=bool(resume),
        resume_step=int(resume) if resume.isdecimal() else None,
        accepts_changed_inputs=flags.get("accept_changed_inputs", False),
        overwrite=flags.get("overwrite", False),
        wants_baseline=not flags.get("no_baseline"),
        dry_run=flags.get("dry_run", False),
        require_clean=flags.get("require_clean", False),
        untracked=tuple(filter(None, (flags.get("untracked") or "").split(","))),
        allow=asker(trusts=flags.get("trust", False)),
        at_once=int(at_once) if at_once else None,
    )


def help_text(verb: str, function: Callable[..., int]) -> str:
    """The help of a verb: its usage, what the docstring of its function says, its flags and examples."""
    description, _, examples = cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
    told = VERBS[verb]
    usages = []
    for action in told.actions or ("",):
        flags = (f"[{flag.usage}]" for flag in told.flags_of(action))
        words = filter(None, ("trireme", verb, action, told.words_of(action), *flags))
        usages.append(fill(" ".join(words), _WIDTH, subsequent_indent=" " * 15, break_on_hyphens=False))
    rows = [(flag.usage, ", ".join(flag.actions), flag.help) for flag in told.flags]
    width = max((len(usage) for usage, _, _ in rows), default=0)
    lines = [
        wrapped(f"  {usage:{width}}  ", f"{actions}: {text}" if actions else text, _WIDTH)
        for usage, actions, text in rows
    ]
    return "\n".join([*usages, "", description, "", *lines, *([""] if lines else []), examples, ""])


def is_override(word: str) -> bool:
    """Whether a word is a setting, where settings are taken."""
    return not word.startswith(_PATH_STARTS) and ("=" in word or word.startswith(_OVERRIDE_STARTS))


def unknown_flag(word: str, known: Sequence[str], words: Sequence[str]) -> str:
    """The message for a flag that is not known, among all the words."""
    name, _, value = word.lstrip("-").partition("=")
    if "." in name:
        hint = f"Settings are written without dashes: {word.lstrip('-')}."
    elif name in _ELSEWHERE:
        value = value or next(iter(words[words.index(word) + 1 :]), "RECIPE")
        hint = _ELSEWHERE[name].format(value=shlex.quote(value))
    elif match := nearest(name, known):
        hint = f"Did you mean --{match}?"
    else:
        hint = f"Known: {', '.join(f'--{flag}' for flag in (*sorted(known), 'help'))}."
    return f"unknown flag {word}. {hint}"


def _unknown_action(verb: str, action: str) -> str:
    known = list(VERBS[verb].actions)
    names = " and ".join(known) if len(known) == 2 else ", ".join(known)
    near = nearest(action, known)
    hint = f" Did you mean {near}?" if near else ""
    return f"{f'{verb} {action}'.strip()}: known {'is' if len(known) == 1 else 'are'} {names}.{hint}"


def _wrong_value(flag: Flag, words: Sequence[str]) -> str:
    """The message for a flag without its value, or with one that it does not take."""
    if flag.value:
        return f"--{flag.name} needs a value. Write --{flag.name}=VALUE."
    given = next(word for word in words if word.startswith(tuple(flag.options)) and word not in flag.options)
    return f"--{flag.name} takes no value, given {given}. Write --{flag.name}."
