"""Every verb of the command line: what it is for, its actions, its words and its flags.

The parser, the help and the shell completion are made from this table; the module of a verb is imported
when the verb is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_RECIPE = "[RECIPE] [key=value ...]"
_POINTS = "RECIPE key=A,B ... [key=value ...]"


@dataclass(frozen=True)
class Flag:
    """One flag of a verb.

    >>> flag = Flag("-f, --file FILE", "what to read")
    >>> flag.options, flag.name, flag.value
    (['-f', '--file'], 'file', 'FILE')
    """

    usage: str
    """As the help shows it. Behind the flag stands what it takes: FILE, RUN, or the allowed words joined
    by ``|``; what it may be given with an equals sign alone stands in brackets: ``[=STEP]``."""
    help: str
    actions: tuple[str, ...] = ()
    """The actions that have it; () = all."""

    @property
    def options(self) -> list[str]:
        """How it is typed, the long form last."""
        words = (word.partition("[")[0].rstrip(",") for word in self.usage.split())
        return [word for word in words if word.startswith("-")]

    @property
    def name(self) -> str:
        """The long form without dashes."""
        return self.options[-1].lstrip("-")

    @property
    def value(self) -> str:
        """What it takes; "" = nothing that has to be given."""
        return "" if self.is_optional else self.usage.partition(self.options[-1])[2].strip()

    @property
    def is_optional(self) -> bool:
        """Whether it may be given with a value and without."""
        return "[=" in self.usage


@dataclass(frozen=True)
class Verb:
    """One verb."""

    module: str
    """Below ``launcher.cli``; holds a function that is named as the verb, whose docstring is its help."""
    line: str
    """What it is for, in the list of verbs."""
    words: str | Mapping[str, str] = ""
    """The words that it takes, as its usage shows them; by action, where it has actions."""
    groups: tuple[str, ...] | Mapping[str, tuple[str, ...]] = field(default=(), kw_only=True)
    """What the settings begin with that mean something to it, also by action; () = all."""
    flags: tuple[Flag, ...] = field(default=(), kw_only=True)

    @property
    def actions(self) -> Mapping[str, str]:
        """The words of each action; a verb without actions has none."""
        return {} if isinstance(self.words, str) else self.words

    def words_of(self, action: str) -> str:
        """The words of an action, or of the verb."""
        return self.words if isinstance(self.words, str) else self.words[action]

    def groups_of(self, action: str) -> tuple[str, ...]:
        """The groups of settings of an action, or of the verb."""
        return self.groups if isinstance(self.groups, tuple) else self.groups.get(action, ())

    def flags_of(self, action: str) -> tuple[Flag, ...]:
        """The flags of an action, or of the verb."""
        return tuple(flag for flag in self.flags if not flag.actions or action in flag.actions)


_RESUME = Flag(
    "--resume[=STEP]",
    "go on in run.dir from its newest checkpoint, or from that after STEP: newer ones are set aside",
)
_FROM = Flag(
    "--from RUN[@STEP]",
    "begin with the weights of another run's checkpoint, the newest or that after STEP; its optimizer, too, "
    "with train.init_optimizer=true",
)
_ACCEPT = (
    "--accept-changed-inputs",
    "resume although data or code are not what the run was started with",
)
_TRUST = ("--trust", "run what the recipe names, unasked, this time")
_OVERWRITE = Flag(
    "--overwrite", "move an existing run.dir aside to <run.dir>.<time>, then start from scratch"
)

VERBS: Mapping[str, Verb] = {
    "plan": Verb(
        "recipes.plan",
        "check a recipe and show what it would do: mesh, schedule, memory, traffic",
        _RECIPE,
        flags=(
            _FROM,
            Flag("--json", "the plan as JSON: what the ranks would be given"),
            Flag("--out FILE", "write to a new file instead of the screen"),
            Flag(
                "--draw FILE",
                "also write the simulated schedule, to a new file: FILE.svg a picture, FILE.json a trace for "
                "ui.perfetto.dev, FILE.csv a table",
            ),
            Flag(*_TRUST),
        ),
    ),
    "run": Verb(
        "runs.start",
        "plan, start the ranks on this machine, follow them, and report the speedup",
        _RECIPE,
        flags=(
            *(_FROM, _RESUME, Flag(*_ACCEPT), _OVERWRITE),
            Flag("--no-baseline", "do not look for the run on one device, and do not make it"),
            Flag(*_TRUST),
        ),
    ),
    "submit": Verb(
        "runs.start",
        "plan, freeze the code, and hand the job to Slurm",
        _RECIPE,
        flags=(
            Flag("--dry-run", "print the job script, byte for byte, and submit nothing; needs no Slurm"),
            *(_FROM, _RESUME, Flag(*_ACCEPT), _OVERWRITE),
            Flag("--no-baseline", "do not look for the run on one device, and do not submit it"),
            Flag("--require-clean", "refuse code that differs from its commit"),
            Flag("--untracked GLOB,...", "copy these files, too; untracked Python files always are"),
            Flag(*_TRUST),
        ),
    ),
    "sweep": Verb(
        "runs.sweep",
        "the same recipe with several values: plan, run, compare, in one table",
        {"plan": _POINTS, "run": _POINTS, "status": "[SWEEP]", "retry": "[SWEEP]", "best": "[SWEEP]"},
        flags=(
            Flag("--no-baseline", "do not look for the run on one device, nor make it", ("run", "retry")),
            Flag(*_ACCEPT, ("retry",)),
            Flag("--at-once N", "on Slurm let at most N points run at a time", ("run", "retry")),
            Flag(
                "--dry-run",
                "on Slurm print what would be submitted, here the points; start nothing",
                ("run",),
            ),
            Flag("--require-clean", "on Slurm refuse code that differs from its commit", ("run",)),
            Flag("--untracked GLOB,...", "on Slurm copy these files, too", ("run",)),
            Flag(*_TRUST, ("plan", "run", "retry")),
            Flag("--by speed|loss", "rank points by throughput (default) or final loss", ("best",)),
        ),
    ),
    "status": Verb(
        "runs.status",
        "how the runs stand",
        "[RUN ...]",
        flags=(
            Flag("--root DIR", "look for runs here instead of in runs/"),
            Flag("--all", "show every run (default: 20 running, 10 pending, 10 ended)"),
        ),
    ),
    "logs": Verb(
        "runs.logs",
        "what a run has printed",
        "RUN",
        flags=(
            Flag("-f, --follow", "keep printing until the run has ended"),
            Flag("--rank N", "the output of rank N"),
        ),
    ),
    "wait": Verb("runs.wait", "follow a run to its end, and report the speedup", "RUN|SWEEP"),
    "cancel": Verb("runs.wait", "end a run", "RUN|SWEEP"),
    "export": Verb("runs.results", "a trained model in Hugging Face's format", "RUN FOLDER"),
    "report": Verb(
        "runs.results",
        "the speedup table again, from stored runs",
        "RUN ...",
        flags=(
            Flag("--base RUN", "the run to compare with, normally on one device"),
            Flag("--json", "the same for programs"),
        ),
    ),
    "data": Verb(
        "recipes.data",
        "make the tokens of a recipe's data, or show what is in them",
        {"prepare": _RECIPE, "show": _RECIPE},
        flags=(Flag(*_TRUST),),
    ),
    "recipe": Verb(
        "recipes.recipe",
        "list the recipes, or show one composed, with the origin of every value",
        {"ls": "", "show": _RECIPE},
    ),
    "bench": Verb(
        "cluster.bench",
        "measure what plans assume: the links between devices",
        {"collectives": "[key=value ...]"},
        groups=("cluster", "device", "executor", "site", "run"),
        flags=(
            Flag("--sizes SIZE,...", "bytes, also as 64KB, 1MB (decimal) or 64KiB, 1MiB"),
            Flag("--ranks N,...", "sizes of the groups"),
            Flag("--json FILE", "all numbers"),
            Flag("--plot FILE", "bus bandwidth over size, as a picture: FILE.svg"),
            Flag(
                "--save NAME",
                "write what was found as a cluster, after which cluster=NAME is known to every plan; a path, "
                "such as cluster/NAME.yaml beside your recipes, writes there",
            ),
        ),
    ),
    "site": Verb(
        "cluster.site",
        "write down what is particular to a cluster, or have the cluster check it",
        {"init": "NAME [key=value ...]", "check": "SITE [RECIPE] [key=value ...]"},
        groups={"init": ("site.",)},
        flags=(
            Flag(
                "--out FILE", "write there, such as for a colleague, and not into your own folder", ("init",)
            ),
            Flag(*_TRUST, ("check",)),
        ),
    ),
    "doctor": Verb("cluster.doctor", "what this machine has, and how to fix what is missing"),
    "completion": Verb("completion.completion", "complete the command line on TAB", "bash|zsh|fish"),
}
"""By name, in the order in which a newcomer meets them."""

TOPICS = {
    "readme": "what Trireme is, a plan, a report, the flow, the verbs",
    "conf": "every setting with its range, its default and what it does; the choices of each group",
    "recipes": "write a recipe, sweep over one, bring a model and data of your own",
    "slurm": "a cluster: sites, submitting, what a run survives, a Slurm on this machine to try it on",
    "plugins": "write a schedule, an architecture, an executor; what goes together; servers and gossip",
    "launcher": "the design: packages, the flow of data, where to add what",
    "tests": "what is proved and where; benchmarks",
}
"""Every page of ``trireme help`` with its line in the list, named after the folder that it is about."""
