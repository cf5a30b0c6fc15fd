"""Every page of the documentation is true: its commands run, its outputs are real, what it names exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from launcher.app.trust import store
from launcher.base.registry import GROUPS
from launcher.cli.main import main
from launcher.cli.verbs import TOPICS, VERBS
from launcher.contract.config import LaunchConfig
from launcher.testing.conformance import SHAPES
from launcher.typed.read import field_types
from launcher.typed.trust import marked
from launcher_plugins.schedules.gpipe import GPipe
from tests.architecture.test_floors import FLOORS, modules
from tests.docs.pages import PAGES, ROOT, Command, commands, files, matches, synopses
from tests.docs.settings_page import PAGE, page
from tests.helpers.pretrained_folders import GPT_2, write_whole_folder
from tests.helpers.tokenizers import write_hugging_face

TEXTS = {name: path.read_text() for name, path in PAGES.items()}
NOT_RUN = {
    "status": "tells of the runs of this machine",
    "logs": "prints what a run has printed",
    "wait": "waits for a job",
    "cancel": "ends a job",
    "export": "needs a checkpoint, and torch",
    "bench": "starts ranks",
    "site": "asks a Slurm",
    "doctor": "tells of this machine",
    "sweep": "is about a stored sweep",
}
"""Verbs whose commands only have their flags checked, and why."""
PLANNED_ELSEWHERE = {("sweep", "run", "pipeline_claims"): "tests/recipes/test_every_recipe_composes.py"}
"""Commands that take seconds to plan, and the test that plans them."""
WRONG_ON_PURPOSE = {"train.eval_intervall"}
"""Settings that a page shows the refusal of."""
COMMANDS = [
    pytest.param(name, command, id=f"{name}:{command.line}")
    for name, text in TEXTS.items()
    for command in commands(text)
]


def as_planned(words: tuple[str, ...]) -> list[str]:
    """A command that starts nothing and is wrong where the given one is; empty where there is none."""
    verb, *rest = words
    is_option = [word.startswith("-") for word in rest]
    plain = [word for word, option in zip(rest, is_option, strict=True) if not option]
    match verb, rest:
        case (("plan" | "data" | "help" | "recipe" | "report"), _):
            return list(words)
        case "run", _:
            return ["plan", *plain]
        case "submit", _:
            return [*words, *([] if "--dry-run" in rest else ["--dry-run"])]
        case "sweep", ["plan" | "run", recipe, *_]:
            values = [word for word in plain if "=" in word]
            return ["sweep", "plan", recipe, *values]
    return []


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that the commands of the pages are about: files, plugins, choices, stored runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own = tmp_path / "config" / "trireme"
    for group, name, like in (("cluster", "mine", "local_cpu"), ("site", "alps", "box")):
        (own / group).mkdir(parents=True)
        shutil.copy(ROOT / "conf" / group / f"{like}.yaml", own / group / f"{name}.yaml")
    (own / "executor").mkdir()
    (own / "executor" / "pbs.yaml").write_text("name: pbs\n")
    shutil.unpack_archive(ROOT / "tests" / "golden" / "quickstart_runs.zip", tmp_path)
    shutil.copytree(tmp_path / "runs" / "mine", tmp_path / "runs" / "even")
    write_whole_folder(tmp_path / "exported", GPT_2 | {"n_positions": 128})
    write_documents(tmp_path)
    store.remember([tmp_path.resolve()], [])
    for text in TEXTS.values():
        for name, content in files(text):
            if name == "pyproject.toml":
                install(tomllib.loads(content), tmp_path)
            else:
                (tmp_path / name).write_text(content)
    return tmp_path


def write_documents(folder: Path) -> None:
    """Records, a tokenizer and a model that goes with it."""
    (folder / "documents").mkdir()
    record = json.dumps({"text": "to be or not to be, that is the question " * 40})
    (folder / "documents" / "plays.jsonl").write_text(f"{record}\n" * 100)
    write_hugging_face(folder / "tokenizer.json")
    write_whole_folder(folder / "base", GPT_2 | {"n_positions": 128, "vocab_size": 320})


def install(project: dict[str, dict[str, object]], site: Path) -> None:
    """What pip writes beside the modules of a distribution."""
    about = project["project"]
    folder = site / f"{str(about['name']).replace('-', '_')}-{about['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    )
    points = about["entry-points"]
    assert isinstance(points, dict)
    lines = [
        f"[{group}]\n{name} = {target}\n" for group, each in points.items() for name, target in each.items()
    ]
    (folder / "entry_points.txt").write_text("".join(lines))


def run_with_plugins(words: list[str], workplace: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(workplace)}
    argv = [sys.executable, "-m", "launcher", *words]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_every_command_works_and_prints_what_the_page_shows(
    name: str, command: Command, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *rest = command.words
    assert verb in (*VERBS, "help")
    main([verb, "--help"])
    known = capsys.readouterr().out
    flags = [word.partition("=")[0] for word in rest if word.startswith("-")]
    assert [flag for flag in flags if flag not in known] == []
    planned = as_planned(command.words)
    if command.words in PLANNED_ELSEWHERE:
        return
    if not planned:
        assert verb in NOT_RUN
        assert command.output is None, "an output that nothing is compared with"
        return
    if {"my_gpipe", "my_sign", "pbs"} & {word.partition("=")[2] for word in planned}:
        done = run_with_plugins(planned, workplace)
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        code = main(planned)
        out, err = capsys.readouterr()
    if command.output is None:
        assert (code, out != "") == (0, True), err
    else:
        assert matches(command.output, err if code else out), err if code else out


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_form_of_a_command_names_a_verb_and_its_flags(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in synopses(text):
        verb = line.split()[1]
        assert verb in (*VERBS, "help"), line
        main([verb, "--help"])
        known = capsys.readouterr().out
        assert [flag for flag in re.findall(r"(?<=\s)--?[a-z-]+", line) if flag not in known] == [], line


def test_the_readme_is_short_and_has_every_verb_and_every_choice() -> None:
    text = TEXTS["readme"]
    assert len(text.splitlines()) < 200
    assert [verb for verb in VERBS if f"    trireme {verb} " not in text] == []
    groups = ("model", "data", "device", "cluster", "precision", "executor", "architecture")
    names = [path.stem for group in groups for path in (ROOT / "conf" / group).glob("*.yaml")]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_every_top_folder_has_a_page_and_the_readme_leads_to_it() -> None:
    folders = {path.name for path in ROOT.iterdir() if (path / "README.md").exists() and path.name[0] != "."}
    assert {*folders, "readme"} == set(TOPICS)
    assert [name for name in folders if f"]({name}/README.md)" not in TEXTS["readme"]] == []


@pytest.mark.parametrize("name", TEXTS)
def test_every_path_that_a_page_names_exists(name: str) -> None:
    found = re.findall(
        r"(?<![\w/.-])(?:launcher|plugins|conf|recipes|slurm|tests|\.ci)/[\w./*-]*[\w/*]", TEXTS[name]
    )
    assert [path for path in found if "NAME" not in path and not list(ROOT.glob(path))] == []
    links = re.findall(r"\]\(([^)]*)\)", TEXTS[name])
    assert [link for link in links if not (PAGES[name].parent / link).exists()] == []


@pytest.mark.parametrize("name", TEXTS)
def test_every_dotted_name_of_a_page_exists(name: str) -> None:
    known = modules()
    allowed = {*GROUPS, *(mark.entry_group for _, mark in marked(LaunchConfig))}
    for dotted in set(re.findall(r"\blauncher(?:_plugins)?(?:\.\w+)+", TEXTS[name])) - allowed:
        module, _, attribute = dotted.rpartition(".")
        source = known[module].read_text() if dotted not in known else ""
        assert dotted in known or re.search(rf"^(class|def) {attribute}\b", source, re.MULTILINE), dotted


@pytest.mark.parametrize("name", TEXTS)
def test_every_setting_that_a_page_names_is_one(name: str) -> None:
    settings = set(re.findall(r"^- `([\w.]+)", TEXTS["conf"], re.MULTILINE))
    settings |= {f"{path}." for path in settings}
    settings |= {"architecture.name", "executor.name"}
    groups = "|".join(group for group in field_types(LaunchConfig) if group not in ("name", "seed"))
    named = re.findall(rf"(?<![\w./])(?:{groups})\.[a-z]\w*(?:\.\w+)*(?!\w*[(/])", TEXTS[name])
    for path in {re.sub(r"roles\.\w+", "roles.NAME", path) for path in named} - WRONG_ON_PURPOSE:
        assert path in settings or any(path.startswith(known) for known in settings if known[-1] == "."), path


def test_the_page_of_settings_is_made_from_the_schema() -> None:
    assert PAGE.read_text() == page(), "run: .venv/bin/python -m tests.docs.settings_page"


def test_the_schedule_of_the_page_is_all_of_gpipe() -> None:
    (source,) = (text for name, text in files(TEXTS["plugins"]) if name == "my_schedules.py")
    module: dict[str, type[GPipe]] = {}
    exec(source, module)
    ours, theirs = GPipe(), module["GPipe"]()
    for shape in SHAPES:
        assert [bool(list(each.check(shape))) for each in (ours, theirs)] == [shape.num_chunks > 1] * 2
        assert ours.bubble_fraction(shape) == theirs.bubble_fraction(shape)
        for rank in range(shape.num_pp_ranks):
            assert list(ours.actions(shape, rank)) == list(theirs.actions(shape, rank))


def test_the_executor_of_the_page_renders_the_plan(workplace: Path) -> None:
    done = run_with_plugins(
        ["submit", "quickstart", "executor=pbs", "run.dir=runs/pbs", "--dry-run"], workplace
    )
    assert "#PBS -l select=1:ncpus=2\n" in done.stdout, done.stderr
    assert f"{workplace}/runs/pbs/plan.json --sha256 " in done.stdout


def test_what_the_executor_of_the_page_finds_wrong_is_not_submitted(workplace: Path) -> None:
    done = run_with_plugins(
        ["submit", "quickstart", "executor=pbs", "cluster.nodes=2", "--dry-run"], workplace
    )
    rule = "cluster.nodes=2: this executor starts ranks on one node. Set cluster.nodes=1."
    assert (done.returncode, done.stdout) == (2, "")
    assert rule in done.stderr


def test_the_floors_of_the_page_are_those_that_the_floor_test_checks() -> None:
    rows = re.findall(r"^    (\d)      (\w.*)$", TEXTS["launcher"], re.MULTILINE)
    assert [(int(floor), set(names.split())) for floor, names in rows] == list(enumerate(FLOORS))[::-1]


@pytest.mark.parametrize(
    ("shown", "is_true"),
    [
        (["a", "b"], True),
        (["a…", "b"], True),
        (["…", "b"], True),
        (["a", "…"], True),
        (["a"], False),
        (["b"], False),
        (["a", "…", "c"], False),
        (["a", "b c"], False),
    ],
)
def test_a_page_that_shows_another_output_is_found(shown: list[str], is_true: bool) -> None:
    assert matches(shown, "a\nb\n") is is_true


def test_a_command_that_is_not_known_any_more_is_found() -> None:
    (command,) = commands("text\n\n    trireme plan quickstart --drawing x.svg  # comment\n")
    assert command == Command(line=3, words=("plan", "quickstart", "--drawing", "x.svg"))
