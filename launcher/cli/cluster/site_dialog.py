"""The questions about a new site: asked, checked, and written to its file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, get_origin

from launcher.base.errors import ConfigError, Fault, LauncherError, did_you_mean
from launcher.config.save import scalar_text
from launcher.config.site_rules import site_faults
from launcher.contract.executor import SiteQuestion, SiteSurvey
from launcher.contract.site import SiteConfig
from launcher.typed.read import Reading, Source, field_types, plain, read

NOTHING = "-"
"""The answer for no value."""


def given_answers(overrides: Sequence[str]) -> dict[str, str | None]:
    """The answers given as ``key=value`` overrides, with or without ``site.`` before the key.

    Raises:
        ConfigError: for every override that is not a setting with one value.
    """
    kinds = field_types(SiteConfig)
    single = [name for name, kind in kinds.items() if not _holds_several(kind) and name != "name"]
    answers: dict[str, str | None] = {}
    faults = []
    for word in overrides:
        key, _, value = word.removeprefix("site.").partition("=")
        if key in single:
            answers[key] = None if value in ("null", "") else value
        elif key in kinds and key != "name":
            fix = "Leave it out, and add it to the file that is written."
            faults.append(Fault(f"site.{key}", value, "holds several values", fix))
        else:
            faults.append(Fault(f"site.{key}", value, "not a setting of a site", did_you_mean(key, single)))
    if faults:
        raise ConfigError(faults)
    return answers


def ask_until_sound(name: str, survey: SiteSurvey, answers: Mapping[str, str | None]) -> str:
    """The file of the site by a person's answers; those that cannot be are asked for again. Where the
    questions end before that, says how to go on with the answers so far.

    Raises:
        LauncherError: when the input ends, or a refused answer is to no question.
    """
    known = dict(answers)
    try:
        while True:
            while (question := survey.question(known)) is not None:
                known[question.setting] = ask_person(question)
            try:
                return site_yaml(name, survey, known)
            except ConfigError as error:
                refused = {fault.path.removeprefix("site.") for fault in error.faults}
                kept = {key: value for key, value in known.items() if key not in refused}
                if survey.question(kept) is None:
                    raise
                print(error)
                known = kept
    except (KeyboardInterrupt, LauncherError):
        given = (f"{key}={'null' if value is None else value}" for key, value in known.items())
        print(f"\nTo go on with these answers: {shlex.join(['trireme', 'site', 'init', name, *given])}")
        raise


def ask_person(question: SiteQuestion) -> str | None:
    """The user's answer; one that is none of the choices is asked for again.

    Raises:
        LauncherError: when the input ends.
    """
    choices = f" ({', '.join(question.choices)})" if question.choices else ""
    leaves_out = "" if question.is_required else f", {NOTHING} for none"
    prompt = f"{question.setting}{choices} [{question.proposal or NOTHING}{leaves_out}]: "
    while True:
        try:
            words = input(prompt).strip()
        except EOFError:
            raise LauncherError("the input ended before every question was answered") from None
        if words == NOTHING and not question.is_required:
            return None
        answer = words or question.proposal
        if answer is None and not question.is_required:
            return None
        if answer and (not question.choices or answer in question.choices):
            return answer
        print(did_you_mean(words, question.choices))


def site_yaml(name: str, survey: SiteSurvey, answers: Mapping[str, str | None]) -> str:
    """The file of the site.

    Raises:
        ConfigError: with every answer that is not allowed.
    """
    chosen = {key: value for key, value in answers.items() if value is not None}
    sources = {f"site.{key}": Source(where="answer", text=value) for key, value in chosen.items()}
    reading = Reading(sources)
    site = read(SiteConfig, {"name": name, **chosen}, reading, "site")
    for fault in site_faults(site) if site else ():
        reading.fault(fault.path, fault.given, fault.allowed, fault.fix)
    if site is None or reading.faults:
        raise ConfigError(reading.faults)
    lines = [f"# {name}, by the cluster's own report:", *(f"#   {fact}" for fact in survey.facts)]
    lines += ["defaults:", "  - none", "  - _self_"]
    standard = plain(SiteConfig())
    lines += [f"{key}: {scalar_text(value)}" for key, value in plain(site).items() if value != standard[key]]
    return "\n".join(lines) + "\n"


def _holds_several(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping | tuple)
