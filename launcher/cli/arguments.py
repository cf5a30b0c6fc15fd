"""The words after a verb: the recipe, the overrides and the flags.

The recipe is the first word without ``=`` that begins with none of ``+ ~ - \\``. A path may hold
``=`` or begin with ``~`` when it is written from ``/``, ``./``, ``../`` or ``~/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.app.request import Request
from launcher.base.errors import LauncherError, nearest

DEFAULT_RECIPE = "quickstart"
_PATH_STARTS = ("/", "./", "../", "~/")
_OVERRIDE_STARTS = ("+", "~", "-", "\\")


@dataclass(frozen=True, kw_only=True)
class Words:
    """What was typed after a verb."""

    recipe: str
    """Name or path of the recipe."""
    overrides: tuple[str, ...]
    """``key=value``, ``+key=value`` and ``~key`` words, in their order."""
    flags: Mapping[str, str | bool]
    """Every flag of the verb by its name without dashes; False where it was not given."""


def split_words(words: Sequence[str], flags: Mapping[str, bool]) -> Words:
    """Tells recipe, overrides and flags apart.

    ``flags`` names the flags that the verb knows, without dashes: True for one that takes a value.

    >>> split_words(["gpt", "parallel.tp=2", "--json"], {"json": False})
    Words(recipe='gpt', overrides=('parallel.tp=2',), flags={'json': True})

    Raises:
        LauncherError: for a flag that the verb does not know, and for a second recipe.
    """
    rest, found = split_flags(words, flags)
    recipes = [word for word in rest if not _is_override(word)]
    if len(recipes) > 1:
        raise LauncherError(
            f"two recipes: {recipes[0]!r} and {recipes[1]!r}. Give one; a setting is written key=value."
        )
    return Words(
        recipe=recipes[0] if recipes else DEFAULT_RECIPE,
        overrides=tuple(word for word in rest if _is_override(word)),
        flags=found,
    )


def request(given: Words) -> Request:
    """What the words ask for; a flag that the verb does not know is as if it was not given.

    Raises:
        LauncherError: for a number of points that is none.
    """
    flags = given.flags
    at_once = flags.get("at-once") or None
    if at_once and (not str(at_once).isdecimal() or int(at_once) < 1):
        raise LauncherError(f"--at-once={at_once}: must be a whole number of at least 1.")
    return Request(
        recipe=given.recipe,
        overrides=given.overrides,
        resume=bool(flags.get("resume")),
        overwrite=bool(flags.get("overwrite")),
        wants_baseline=not flags.get("no-baseline"),
        dry_run=bool(flags.get("dry-run")),
        require_clean=bool(flags.get("require-clean")),
        untracked=tuple(filter(None, str(flags.get("untracked") or "").split(","))),
        at_once=int(at_once) if at_once else None,
    )


def split_flags(
    words: Sequence[str], flags: Mapping[str, bool]
) -> tuple[tuple[str, ...], dict[str, str | bool]]:
    """Takes the flags out: what is left, and every flag by name (False where it was not given).

    >>> split_flags(["runs/a", "--base", "runs/b"], {"base": True, "json": False})
    (('runs/a',), {'base': 'runs/b', 'json': False})

    Raises:
        LauncherError: for an unknown flag or one given twice, for a missing or an empty value, or for
            a value that is not taken.
    """
    rest: list[str] = []
    found: dict[str, str | bool] = dict.fromkeys(flags, False)
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("-"):
            rest.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        _check_flag(word, name, flags, has_value=bool(equals))
        if found[name]:
            raise LauncherError(f"--{name} is given twice. Give it once.")
        if not flags[name]:
            found[name] = True
            continue
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise LauncherError(f"{word} needs a value. Write --{name}=VALUE.")
            value = queue.pop(0)
        if not value.strip():
            raise LauncherError(f"--{name} needs a value, given an empty one. Write --{name}=VALUE.")
        found[name] = value
    return tuple(rest), found


def _check_flag(word: str, name: str, flags: Mapping[str, bool], *, has_value: bool) -> None:
    if name not in flags or not word.startswith("--"):
        raise LauncherError(f"unknown flag {word}. {_flag_hint(word, name, flags)}")
    if has_value and not flags[name]:
        raise LauncherError(f"--{name} takes no value, given {word}. Write --{name}.")


def _flag_hint(word: str, name: str, flags: Mapping[str, bool]) -> str:
    if "." in name:
        return f"Settings are written without dashes: {word.lstrip('-')}."
    match = nearest(name, flags)
    if match:
        return f"Did you mean --{match}?"
    return f"Known: {', '.join(f'--{flag}' for flag in (*sorted(flags), 'help'))}."


def _is_override(word: str) -> bool:
    if word.startswith(_PATH_STARTS):
        return False
    return "=" in word or word.startswith(_OVERRIDE_STARTS)
