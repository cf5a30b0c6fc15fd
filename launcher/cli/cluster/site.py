"""``trireme site``: writes down what is particular to a cluster, and has the cluster check it."""

from __future__ import annotations

import re
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from launcher.base import resources
from launcher.base.errors import ConfigError, Fault, LauncherError
from launcher.base.files import check_new, write_new
from launcher.cli.arguments import one_recipe
from launcher.cli.ask import asker
from launcher.cli.cluster.site_dialog import ask_until_sound, given_answers, site_yaml
from launcher.contract.config import SUBMITTING_EXECUTOR
from launcher.contract.executor import Executor, SiteSurvey

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_SMALL = ("parallel.pp=1", "cluster.devices_per_node=1", "report.baseline=none")
"""A job of one rank."""


def site(given: Namespace) -> int:
    """Writes the file of a site, or has the cluster check one.

      init   asks the cluster what it is like, and you for what it leaves open; writes the file of a site,
             after which site=NAME is known. key=value answers a question beforehand. Without a terminal
             nothing is asked: what is proposed is taken.
      check  plans a small job for a site, or the one of a recipe, and has the scheduler check it. Nothing
             is submitted.

    Examples:
      trireme site init alps
      trireme site init alps partition=gpu account=physics time_limit=12:00:00
      trireme site check box
    """
    action = given.action
    if not given.names:
        raise LauncherError(f"site {action} needs the name of a site. Write trireme site {action} NAME.")
    return _init(given) if action == "init" else _check(given)


def _init(given: Namespace) -> int:
    name, *more = given.names
    if more:
        raise LauncherError(f"site init takes one name, given {' '.join(given.names)}.")
    path = Path(given.out) if given.out else resources.user_folder() / "site" / f"{name}.yaml"
    _check_name(name)
    check_new(path, "out")
    survey = _cluster().survey()
    assert survey is not None, "the executor that comes with the launcher knows its cluster"
    answers = given_answers(given.overrides)
    print(*survey.facts, sep="\n")
    is_asked = sys.stdin.isatty() and sys.stdout.isatty()
    text = (ask_until_sound if is_asked else _proposed)(name, survey, answers)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_new(path, text, "out")
    print(f"\n{text}\nwrote {path}")
    print(f"  trireme site check {name}\n  trireme submit quickstart site={name}")
    return 0


def _proposed(name: str, survey: SiteSurvey, answers: dict[str, str | None]) -> str:
    """The file of the site with what is proposed where nothing is given."""
    while (question := survey.question(answers)) is not None:
        answers[question.setting] = question.proposal
        if question.is_required and question.proposal is None:
            path, choices = f"site.{question.setting}", question.choices
            example = f"trireme site init {name} {question.setting}={choices[0]}"
            fix, ways = f"Give one of {', '.join(choices)}: {example}", ({path: choices[0]},)
            raise ConfigError([Fault(path, "null", "the cluster has no default", fix, ways=ways)])
    return site_yaml(name, survey, answers)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise LauncherError(f"site init {name}: a name holds small letters, digits, - and _.")
    if (resources.folder("conf") / "site" / f"{name}.yaml").exists():
        raise LauncherError(f"site init {name}: a site of this name ships with Trireme. Choose another name.")


def _check(given: Namespace) -> int:
    from launcher.app.planning import make_plan  # imports hydra, which the help does not need
    from launcher.plan.rules.checks import with_sources
    from launcher.runs.render import render

    name, *recipes = given.names
    is_small = not recipes and not given.overrides
    small = _SMALL if is_small else ()
    overrides = (f"executor={SUBMITTING_EXECUTOR}", f"site={name}", *small, *given.overrides)
    recipe = one_recipe(recipes)
    allow = asker(trusts=given.trust)
    planned = make_plan(recipe, overrides, allow=allow)
    if is_small and planned.plan.config.site.gpu_request != "none":
        planned = make_plan(recipe, (*overrides, "device.kind=cuda"), allow=allow)
    with tempfile.TemporaryDirectory() as folder:
        try:
            script = render(planned.plan, Path(folder))
        except ConfigError as error:
            raise ConfigError(with_sources(error.faults, planned.composed.sources)) from None
        Path(folder, "job.sh").write_text(script.text, encoding="utf-8")
        _cluster().try_out(script)
    print(*(line for line in script.text.splitlines() if re.match("#[A-Z]", line)), sep="\n")
    print(f"the scheduler accepts this job of {planned.plan.config.name} with site={name}")
    return 0


def _cluster() -> Executor:
    from launcher.base import registry

    return registry.load(Executor, SUBMITTING_EXECUTOR)
