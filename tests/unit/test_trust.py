"""What a recipe names is run and read only where the reader trusts its folder, and is asked about once."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.app import planning
from launcher.app.planning import make_plan
from launcher.app.trust import store
from launcher.app.trust.check import NotTrustedError, check_recorded
from launcher.app.trust.question import Question, always, never
from launcher.base.errors import ConfigError, LauncherError
from launcher.cli.ask import ask_person
from launcher.cli.main import main
from launcher.contract.model.shape import Measured
from tests.helpers.configs import launch_config
from tests.helpers.terminals import END_OF_INPUT, answered

HEAD = "defaults: [/quickstart, {}_self_]\n"
OUTSIDE = "data: {source: '/data/**'}\n"
"""Names files elsewhere, which a plan does not read: allowing it takes no time."""
QUESTION = "from now on? [y/N] "


@pytest.fixture
def lab(tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipes that its reader has not seen yet."""
    folder = tmp_path / "lab"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "reads.yaml").write_text(HEAD.format("") + OUTSIDE)
    return folder


def running(lab: Path, command: str) -> str:
    """A recipe whose model is a command, to be run while it is planned; returns its name."""
    options = json.dumps({"command": command})
    text = HEAD.format("override /model: custom, ") + f"model: {{target: os:system, options: {options}}}\n"
    (lab / "runs.yaml").write_text(text)
    return "./runs.yaml"


def own_module(lab: Path, name: str = "ours.yaml", target: str = "net_of_tests:Net") -> str:
    """A recipe that trains on data of a module; returns its name."""
    (lab / "net_of_tests.py").write_text("raise RuntimeError('imported')\n")
    text = HEAD.format("override /data: custom, ") + f"data: {{target: '{target}'}}\n"
    (lab / name).write_text(text)
    return f"./{name}"


def asked(recipe: str, overrides: Sequence[str] = ()) -> Question | None:
    """What a plan of a recipe asks; None: nothing."""
    questions: list[Question] = []

    def ask(question: Question) -> bool:
        questions.append(question)
        return True

    try:
        make_plan(recipe, overrides, allow=ask)
    except ConfigError:  # of what comes after the question
        if not questions:
            raise
    return questions[0] if questions else None


@pytest.fixture
def not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that are allowed are taken for sound."""
    monkeypatch.setattr(planning, "measured_code", lambda *_: Measured(model=None, num_samples=10_000))


# No terminal


VERBS = {
    "plan": ("plan", "./runs.yaml"),
    "sweep plan": ("sweep", "plan", "./runs.yaml", "parallel.dp=1,2"),
    "submit": ("submit", "./runs.yaml", "site=box", "cluster.devices_per_node=2", "--dry-run"),
    "run": ("run", "./runs.yaml"),
    "sweep run": ("sweep", "run", "./runs.yaml", "parallel.dp=1,2"),
    "site check": ("site", "check", "box", "./runs.yaml"),
}


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
def test_no_verb_runs_what_an_unknown_recipe_names(lab: Path, words: Sequence[str], capfd: Any) -> None:
    running(lab, f"touch {lab}/has_run")
    assert main(words) == 2
    assert not (lab / "has_run").exists()
    assert f"model.target=os:system: {lab} is not a folder whose recipes you have" in capfd.readouterr().err


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
def test_the_same_verbs_run_it_where_it_is_trusted(lab: Path, words: Sequence[str]) -> None:
    """Else the test above would show nothing."""
    running(lab, f"touch {lab}/has_run")
    assert main([*words, "--trust"]) == 2  # a number is no model
    assert (lab / "has_run").exists()
    assert not store.trust_file().exists()


def test_the_refusal_names_the_value_the_line_and_what_to_do(lab: Path) -> None:
    with pytest.raises(
        NotTrustedError,
        match=r"^data\.source=/data/\*\*: .*/lab is not a folder whose recipes you have allowed to run code "
        r"and to read other files\. See what it is; then give --trust, or plan it once on a terminal, where "
        r"you are asked\. \[reads\.yaml:2\]$",
    ):
        make_plan("./reads.yaml", [])


def test_a_sweep_is_asked_about_once_and_refused_as_a_whole(lab: Path, capfd: Any) -> None:
    assert main(["sweep", "plan", "./reads.yaml", "parallel.pp=1,2"]) == 2
    assert capfd.readouterr().err.count("data.source=/data/**") == 1


# On a terminal


def test_a_yes_is_asked_for_once_however_the_recipe_is_edited(lab: Path) -> None:
    code, told = answered(["plan", "./reads.yaml"], lab, "y\n")
    assert code == 0
    assert told.startswith(
        f"{lab}, which you have not allowed yet, names what would be run or read as you:\n"
        f"  data.source=/data/**  [reads.yaml:2]\nAllow {lab}, with all that is below it, {QUESTION}"
    )
    (lab / "reads.yaml").write_text(HEAD.format("") + OUTSIDE.replace("/data", "/other"))
    (lab / "below").mkdir()
    (lab / "below" / "more.yaml").write_text((lab / "reads.yaml").read_text())
    assert asked("./reads.yaml") is asked("./below/more.yaml") is None


@pytest.mark.parametrize("answer", ["n\n", "\n", "yess\n", END_OF_INPUT])
def test_any_other_answer_is_a_no_and_the_next_time_is_asked_again(lab: Path, answer: str) -> None:
    code, told = answered(["plan", "./reads.yaml"], lab, answer)
    assert (code, told.count(QUESTION)) == (2, 1)
    assert "is not a folder whose recipes you have allowed" in told
    assert asked("./reads.yaml") is not None


def test_control_characters_of_names_are_shown_escaped(lab: Path) -> None:
    folder = lab / "\x1b[2J\nAllow"
    folder.mkdir()
    (lab / "reads.yaml").rename(folder / "reads.yaml")
    _, told = answered(["plan", "./reads.yaml"], folder, "n\n")
    assert "\x1b" not in told
    assert told.startswith(rf"{lab}/\x1b[2J\nAllow, which you have not allowed yet, names")


def test_code_is_shown_with_what_it_is_called_with(lab: Path) -> None:
    _, told = answered(["plan", running(lab, "rm -rf ~")], lab, "n\n")
    assert '  model.target=os:system with {"command": "rm -rf ~"}, which is not in that folder  [' in told


def test_trust_given_on_the_command_line_is_not_remembered(lab: Path) -> None:
    assert main(["plan", "./reads.yaml", "--trust"]) == 0
    assert main(["plan", "./reads.yaml"]) == 2


# What is trusted


def test_a_folder_that_was_moved_is_asked_about_again(lab: Path) -> None:
    store.remember([lab], [])
    assert asked("./reads.yaml") is None
    lab.rename(lab.with_name("moved"))
    assert asked("../moved/reads.yaml") is not None


def test_a_link_to_a_trusted_folder_is_that_folder_and_one_out_of_it_is_not(lab: Path) -> None:
    store.remember([lab], [])
    (lab.parent / "link").symlink_to(lab)
    assert asked("../link/reads.yaml") is None
    (lab.parent / "elsewhere.yaml").write_text((lab / "reads.yaml").read_text())
    (lab / "linked.yaml").symlink_to("../elsewhere.yaml")
    question = asked("./linked.yaml")
    assert question is not None
    assert question.folders == (lab, lab.parent)


@pytest.mark.usefixtures("not_measured")
def test_a_module_of_the_folder_is_allowed_with_it_and_others_by_name(lab: Path) -> None:
    recipe = own_module(lab)
    question = asked(recipe)
    assert question is not None
    assert question.targets == ()
    store.remember(question.folders, question.targets)
    assert asked(recipe) is None
    outside = asked(own_module(lab, target="json:loads"))
    assert outside is not None
    assert outside.targets == ("json:loads",)
    store.remember(outside.folders, outside.targets)
    assert asked(recipe) is None
    assert asked(own_module(lab, target="json:dumps")) is not None


def test_a_module_of_the_folder_with_the_name_of_an_installed_one_is_outside(lab: Path) -> None:
    (lab / "yaml.py").touch()
    (lab / "os.py").touch()
    for target in ("yaml:load", "os:system"):
        question = asked(own_module(lab, target=target))
        assert question is not None
        assert question.targets == (target,)


@pytest.mark.usefixtures("not_measured")
@pytest.mark.parametrize("is_in_recipe", [True, False])
def test_what_an_installed_package_declares_needs_no_question(
    lab: Path, monkeypatch: pytest.MonkeyPatch, is_in_recipe: bool
) -> None:
    place = lab / "site-packages" if is_in_recipe else lab.parent / "site-packages"
    point = SimpleNamespace(value="json:loads", dist=SimpleNamespace(locate_file=lambda _: place))
    known = metadata.entry_points
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [point] if group == "launcher.data" else known(group=group)
    )
    assert (asked(own_module(lab, target="json:loads")) is not None) is is_in_recipe
    assert asked(own_module(lab, target="json:dumps")) is not None


@pytest.mark.usefixtures("not_measured")
def test_what_the_reader_types_needs_no_question(lab: Path) -> None:
    assert asked("./reads.yaml", ["data.source=/mine/**"]) is None
    assert asked(own_module(lab), ["data.target=json:loads"]) is None


@pytest.mark.usefixtures("not_measured")
def test_a_module_beside_the_recipe_is_the_recipes_whoever_names_it(lab: Path) -> None:
    recipe = own_module(lab, target="json:loads")
    question = asked(recipe, ["data.target=net_of_tests:Net"])
    assert question is not None
    assert [(named.path, named.target) for named in question.named] == [("data.target", "")]


@pytest.mark.usefixtures("not_measured")
@pytest.mark.parametrize("is_here", [True, False])
def test_no_module_is_imported_from_a_folder_that_is_not_trusted(
    lab: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    here = lab if is_here else lab.parent
    monkeypatch.chdir(here)
    recipe, words = str(lab / own_module(lab)), ["data.target=json:loads"]
    roots = make_plan(recipe, words).plan.source_roots
    assert roots == (() if is_here else (str(here),))
    store.remember([lab], [])
    assert make_plan(recipe, words).plan.source_roots == tuple(dict.fromkeys((str(lab), str(here))))


@pytest.mark.usefixtures("not_measured")
def test_a_module_of_the_current_folder_below_the_recipe_is_asked_about(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab / "plain.yaml").write_text(HEAD.format(""))
    (lab / "below").mkdir()
    monkeypatch.chdir(lab / "below")
    own_module(lab / "below")
    words = ["data=custom", "data.target=net_of_tests:Net"]
    with pytest.raises(NotTrustedError, match=r"^data\.target=net_of_tests:Net: .*then give --trust, or"):
        make_plan("../plain.yaml", words)
    roots = make_plan("../plain.yaml", words, allow=always).plan.source_roots
    assert roots == (str(lab), str(lab / "below"))


def test_what_the_reader_types_as_a_reference_to_the_recipe_does(lab: Path) -> None:
    (lab / "reads.yaml").write_text(HEAD.format("") + "device: {name: '/data/**'}\n")
    question = asked("./reads.yaml", ["data.source='${device.name}'"])
    assert question is not None
    assert [(named.path, named.value) for named in question.named] == [("data.source", "/data/**")]


def test_a_shipped_recipe_and_one_of_the_readers_own_folder_need_none(lab: Path, own_folder: Path) -> None:
    (own_folder / "mine.yaml").write_text(HEAD.format("") + OUTSIDE)
    assert asked(str(own_folder / "mine.yaml")) is asked("quickstart", ["data.source=/data/**"]) is None


def test_the_axes_of_a_recipe_are_not_typed_by_its_reader(lab: Path) -> None:
    (lab / "reads.yaml").write_text(HEAD.format("") + "sweep: {data: {source: '/a/*,/b/*'}}\n")
    assert main(["sweep", "plan", "./reads.yaml"]) == 2
    assert main(["sweep", "plan", "./reads.yaml", "data.source=/a/*,/b/*"]) == 0


INSIDE = ("{lab}/*.txt", "text.txt", "sub/**/*.txt", "package:pydoc_data/topics.py")
LEAVING = (
    "/**",
    "../*.txt",
    "{lab}/../lab/../a.txt",
    "~/a.txt",
    "link/*.txt",
    "link/a.txt",
    "link/../lab/*.txt",
)


@pytest.mark.parametrize(("source", "is_asked"), [(s, False) for s in INSIDE] + [(s, True) for s in LEAVING])
def test_data_is_asked_about_where_it_leaves_the_folder(lab: Path, source: str, is_asked: bool) -> None:
    (lab / "text.txt").write_text("text")
    (lab / "link").symlink_to("..")
    (lab.parent / "a.txt").touch()
    (lab / "reads.yaml").write_text(HEAD.format("") + f"data: {{source: '{source.format(lab=lab)}'}}\n")
    assert (asked("./reads.yaml") is not None) is is_asked


@pytest.mark.parametrize(
    "text",
    [
        "model: {path: /m}",
        *("train: {init_from: /weights}", "report: {baseline: /run}", "device: {measured_in: /run}"),
        *("data: {tokenizer: /words}", "data: {eval_source: /texts}"),
        "data: {source: ['package:pydoc_data/topics.py', /texts], weights: [1, 1]}",
    ],
)
def test_other_settings_that_name_files_are_asked_about_too(lab: Path, text: str) -> None:
    (lab / "reads.yaml").write_text(HEAD.format("") + text + "\n")
    with pytest.raises(NotTrustedError, match=r"=/\w+: .*See what it is"):
        make_plan("./reads.yaml", [])


# The file of folders


def test_the_file_is_the_readers_alone(lab: Path) -> None:
    store.remember([lab], [])
    assert store.trust_file().stat().st_mode & 0o777 == 0o600
    assert json.loads(store.trust_file().read_text()) == {"folders": {str(lab): []}}
    assert [path.name for path in store.trust_file().parent.iterdir()] == ["trusted.json"]


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_not_believed(lab: Path, mode: int) -> None:
    store.remember([lab], [])
    store.trust_file().chmod(mode)
    with pytest.raises(NotTrustedError, match=r"json is not believed, as others can write to it: see"):
        make_plan("./reads.yaml", [])
    code, told = answered(["plan", "./reads.yaml"], lab, "y\n")
    assert (code, "is not believed" in told) == (0, True)
    assert store.trust_file().stat().st_mode & 0o777 == mode


def test_a_file_of_somebody_else_is_not_believed(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.remember([lab], [])
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(NotTrustedError, match=r"is not believed, as it belongs to somebody else: remove it"):
        make_plan("./reads.yaml", [])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"folders": []}', '{"folders": {"/": 1}}', "[" * 9999])
def test_a_damaged_file_trusts_nothing(lab: Path, text: str) -> None:
    store.trust_file().write_text(text)
    store.trust_file().chmod(0o600)
    assert asked("./reads.yaml") is not None
    store.remember([lab], [])
    assert asked("./reads.yaml") is None


def test_a_folder_that_everybody_can_write_to_is_not_asked_about(lab: Path) -> None:
    lab.chmod(0o777)
    with pytest.raises(
        NotTrustedError,
        match=r"everybody can write to .*/lab, so it is not trusted and not asked about\. Move the recipe to "
        r"a folder of your own, or see what it is and give --trust\.",
    ):
        asked("./reads.yaml")
    make_plan("./reads.yaml", [], allow=always)


@pytest.mark.parametrize("name", ["lab", "lab/below"])
def test_a_trusted_folder_that_everybody_can_write_to_by_now_is_refused(lab: Path, name: str) -> None:
    store.remember([lab], [])
    folder = lab.parent / name
    folder.mkdir(exist_ok=True)
    (folder / "again.yaml").write_text((lab / "reads.yaml").read_text())
    assert asked(f"{folder}/again.yaml") is None
    folder.chmod(0o777)
    with pytest.raises(NotTrustedError, match=rf"everybody can write to .*/{name}, so it is not trusted and"):
        asked(f"{folder}/again.yaml")


def owned_by(folder: Path, owner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is another user's from now on."""
    known = Path.stat

    def stat(path: Path, **words: Any) -> os.stat_result:
        found = known(path, **words)
        return os.stat_result([*found[:4], owner, *found[5:10]]) if path == folder else found

    monkeypatch.setattr(Path, "stat", stat)


@pytest.mark.parametrize(("owner", "is_believed"), [(0, True), (4711, False)])
def test_a_trusted_folder_that_is_somebody_elses_by_now_is_asked_about(
    lab: Path, monkeypatch: pytest.MonkeyPatch, owner: int, is_believed: bool
) -> None:
    store.remember([lab], [])
    owned_by(lab, owner, monkeypatch)
    assert (asked("./reads.yaml") is None) is is_believed


def test_a_yes_to_a_folder_of_somebody_else_holds_for_this_time(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owned_by(lab, 4711, monkeypatch)
    with pytest.raises(NotTrustedError, match=r", and .*/lab belongs to somebody else\. .* give --trust\."):
        make_plan("./reads.yaml", [])
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    make_plan("./reads.yaml", [], allow=ask_person)
    assert f"note: {lab} belongs to somebody else; a yes holds for this time\n" in capsys.readouterr().err
    assert not store.trust_file().exists()


@pytest.mark.parametrize(("variable", "below"), [("HOME", ""), ("HOME", "me"), ("TMPDIR", "")])
def test_trust_in_a_folder_that_everything_lands_below_is_in_its_own_files_alone(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, below: str
) -> None:
    monkeypatch.setenv(variable, str(lab / below))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (lab / "below").mkdir()
    (lab / "below" / "more.yaml").write_text((lab / "reads.yaml").read_text())
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    make_plan("./reads.yaml", [], allow=ask_person)
    assert f"Allow {lab}, with the files directly in it, {QUESTION}" in capsys.readouterr().err
    assert asked("./reads.yaml") is None
    assert asked("./below/more.yaml") is not None


def test_a_yes_that_cannot_be_written_holds_for_this_time(lab: Path, own_folder: Path) -> None:
    own_folder.rmdir()
    own_folder.touch()
    code, told = answered(["plan", "./reads.yaml"], lab, "y\n")
    assert (code, "note: this is not remembered: " in told) == (0, True)


# Runs of somebody else


def test_recorded_code_of_somebody_else_is_asked_about(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = launch_config(model={"target": "net:Net"})
    check_recorded(lab, [config], never)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    check_recorded(lab, [config], always)
    with pytest.raises(NotTrustedError, match=r"^model\.target=net:Net: "):
        check_recorded(lab, [config], never)


def test_a_program_allows_what_it_wants(lab: Path) -> None:
    with pytest.raises(ConfigError):
        make_plan("./reads.yaml", [])
    assert make_plan("./reads.yaml", [], allow=always).plan.config.data.source == "/data/**"


def test_the_glob_of_a_package_stays_in_it() -> None:
    from launcher.contract.data.files import find_files

    for pattern in ("../*", "/etc/passwd"):
        with pytest.raises(LauncherError, match=r"leaves the package\. Name files below .*pydoc_data\."):
            find_files(f"package:pydoc_data/{pattern}")
