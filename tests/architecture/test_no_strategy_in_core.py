"""The core knows no strategy by name: what a plan or a report says of one comes from its plugin."""

import re
from pathlib import Path

import pytest

from launcher.base import registry

CORE = Path(__file__).resolve().parents[2] / "launcher"
GENERIC = {"data", "pipeline", "tensor", "zero"}
"""Names of plugins that are words of the field; `WORDS` has those of ZeRO."""
WORDS = (
    *(r"ZeRO", r"zero_(?:stage|offload|options)", r"\"zero\"", "deepspeed", "interleaved", "zero bubble"),
    *("parameter server", "servers?", "workers?", "staleness", "sbatch", "squeue", "srun"),
)
SCHEDULES = ("1f1b", "gpipe", "interleaved", "interleaved_1f1b", "zb_h1")
ALLOWED = {
    "contract/config.py": (
        (*SCHEDULES, "zero_", "zero", "deepspeed", "decentralized", "torchrun", "slurm"),
        "the schema of what users type, and the names of the defaults",
    ),
    "contract/optim/config.py": (("adamw",), "an example of a name"),
    "contract/site.py": (("slurm", "sbatch", "srun", "parameter server", "server"), "the schema of a site"),
    "contract/moved.py": (
        ("decentralized", "gossip", "parameter_server", "server", "worker", "zero", "slurm"),
        "what stored plans of older launchers name",
    ),
    "contract/records.py": (
        ("server",),
        "server_wait, a kind of time in stored records: any role that serves",
    ),
    "contract/heartbeat.py": (("server",), "the same in heartbeats"),
    "metrics/blocked_time.py": (("server",), "the same, read"),
    "report/tables.py": (("server", "servers"), "the same, shown"),
    "runs/hang.py": (("server",), "the same, of a rank that waits"),
    "report/runs.py": (("1f1b",), "an example of a layout"),
    "config/save.py": (("1f1b",), "an example of a value that YAML would read as another type"),
    "app/sweep/grid.py": (SCHEDULES, "examples of a sweep over schedules"),
    "schedule/passes.py": (("1f1b", "interleaved"), "how far ahead the published schedules have to receive"),
    "config/site_rules.py": (("slurm", "srun"), "the formats of settings of a site"),
    "base/resources.py": (("slurm",), "a folder of the repository"),
    "runs/facts.py": (("deepspeed",), "versions of libraries that a run is recorded with"),
    "cli/": (
        (*SCHEDULES, "slurm", "sbatch", "srun", "squeue", "deepspeed", "server", "servers", "gossip"),
        "help",
    ),
    "runtime/process/": (
        ("torchrun", "srun", "1f1b", "gpipe", "zero"),
        "who starts ranks; a hint; a comment",
    ),
    "runtime/model/": (("zero", "zero bubble"), "a paper, and a comment"),
}
"""By file or folder: the words that may be there, and why."""


def pattern() -> re.Pattern[str]:
    names = [name for group in registry.GROUPS for name in registry.own_plugins(group) if name not in GENERIC]
    words = sorted({*map(re.escape, names), *WORDS}, key=len, reverse=True)
    return re.compile(rf"(?<![A-Za-z])(?:{'|'.join(words)})(?![A-Za-z])", re.IGNORECASE)


def found_words(text: str) -> set[str]:
    """The names of strategies in a text; ``zero`` only as ZeRO and in names of settings."""
    words = {match.group() for match in pattern().finditer(text)}
    return {word.strip('"').lower() for word in words if word.lower() != "zero" or word == "ZeRO"}


def allowed(module: str) -> set[str]:
    return {word for place, (words, _) in ALLOWED.items() if module.startswith(place) for word in words}


SOURCES = sorted(str(path.relative_to(CORE)) for path in CORE.rglob("*.py"))


@pytest.mark.parametrize("module", SOURCES)
def test_no_strategy_is_named_but_where_it_must_be(module: str) -> None:
    found = found_words((CORE / module).read_text(encoding="utf-8"))
    assert {word for word in found if not word.startswith(tuple(allowed(module) or {"\0"}))} == set()


@pytest.mark.parametrize("place", ALLOWED)
def test_every_allowance_is_needed(place: str) -> None:
    modules = [module for module in SOURCES if module.startswith(place)]
    assert any(found_words((CORE / module).read_text(encoding="utf-8")) for module in modules)


@pytest.mark.parametrize(
    "line",
    [
        'words += [f"zero={parallel.zero_stage}"]',
        '"""What the servers took."""',
        'is_plain = config.architecture.name == "decentralized"',
        "# DeepSpeed's own",
        "def lost_workers(): ...",
    ],
)
def test_a_strategy_is_seen(line: str) -> None:
    assert found_words(line)


def test_words_of_english_are_none() -> None:
    assert not found_words("zero bytes; observers; network; torch.zeros; tensor and data parallel")
