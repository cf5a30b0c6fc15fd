import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base import registry
from launcher.base.errors import LauncherError
from launcher.cli.completion.answers import answers
from launcher.cli.completion.bash_line import read_line, replies
from launcher.cli.completion.completion import answer
from launcher.cli.main import main, run_verb
from launcher.cli.verbs import TOPICS, VERBS
from launcher.config.recipes import shipped
from launcher.contract.config import LaunchConfig, ParallelConfig
from launcher.typed.read import field_types


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def words_for(*words):
    return [word for word, _ in answers(words)]


def touch(*names):
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


# Verbs and flags


def test_the_first_word_is_a_verb_with_what_it_is_for():
    assert answers([""])[:-1] == [(name, verb.line) for name, verb in VERBS.items()]
    assert words_for("hel") == ["help"]
    assert words_for("--v") == ["--version"]
    assert words_for("no_such_verb", "") == []


def test_behind_help_stand_the_topics_and_the_verbs():
    assert {*words_for("help", "")} == {*VERBS, *TOPICS}
    assert words_for("help", "conf", "") == []


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.actions])
def test_behind_a_verb_with_actions_stand_its_actions(verb):
    assert words_for(verb, "") == list(VERBS[verb].actions)
    assert words_for(verb, "no_such_action", "") == []


def test_flags_are_those_of_the_action_that_are_not_given_yet():
    assert words_for("sweep", "best", "-") == ["--by", "--help"]
    assert words_for("plan", "--json", "--out=x", "--") == ["--from", "--draw", "--trust", "--help"]
    assert ("--json", "the same for programs") in answers(["report", "--j"])


def test_the_value_of_a_flag_is_of_the_kind_that_its_usage_names():
    touch("plans/a.json", "runs/one/job.json")
    assert words_for("sweep", "best", "--by", "") == ["speed", "loss"]
    assert words_for("sweep", "best", "--by=l") == ["--by=loss"]
    assert words_for("plan", "--out", "pl") == ["plans/"]
    assert words_for("plan", "--out=plans/") == ["--out=plans/a.json"]
    assert words_for("report", "--base", "o") == ["one"]
    assert words_for("bench", "collectives", "--json", "pl") == ["plans/"]
    assert words_for("bench", "collectives", "--ranks", "") == []


# Plain words


def test_a_recipe_is_a_shipped_name_or_a_yaml_file_and_is_given_once():
    touch("mine.yaml", "mine.txt", "folder/deep.yml", "a=b.yaml", "-dash.yaml")
    found = words_for("run", "")
    assert {*shipped(), "mine.yaml", "folder/", "./a=b.yaml", "./-dash.yaml", "model."} <= {*found}
    assert words_for("run", "folder/") == ["folder/deep.yml"]
    assert words_for("run", "mi") == ["mine.yaml"]
    assert words_for("run", "mine.yaml", "mi") == []
    assert answers(["plan", "quick"]) == [("quickstart", answers(["recipe", "show", "quick"])[0][1])]


def test_runs_and_sweeps_go_by_their_name_or_path():
    touch("runs/one/job.json", "runs/other/plan.json", "runs/of/sweep.json", "runs/of/0-a/job.json")
    assert words_for("logs", "o") == ["one"]
    assert words_for("sweep", "status", "o") == ["of"]
    assert words_for("wait", "o") == ["of", "one"]
    assert words_for("cancel", "runs/o") == ["runs/of", "runs/one", "runs/other/"]
    assert words_for("report", "one", "on") == ["one"]
    assert words_for("logs", "one", "o") == []
    assert words_for("export", "one", "r") == ["runs/"]


def test_a_site_is_checked_by_its_name():
    assert words_for("site", "check", "bo") == ["box"]
    assert words_for("site", "check", "box", "quick") == ["quickstart"]


def test_a_new_site_is_given_its_own_settings():
    assert words_for("site", "init", "alps", "") == ["site."]
    assert words_for("site", "init", "alps", "site.gpu_request=gpus") == ["site.gpu_request=gpus_per_node"]


@pytest.mark.parametrize("name", ["new\nline.yaml", "\x1b[31m.yaml", "tab\t.yaml", "\udcff.yaml"])
def test_a_name_that_is_not_printable_is_never_offered(name):
    touch(name)
    assert [word for word in words_for("plan", "") if ".yaml" in word] == []


def test_a_choice_and_what_is_told_of_it_cannot_change_the_terminal():
    touch("lab/r.yaml", "lab/model/new\nline.yaml")
    Path("lab/model/odd.yaml").write_text("# \x1b[31mred\ttab\n")
    assert answers(["plan", "lab/r.yaml", "model=n"]) == []
    assert answers(["plan", "lab/r.yaml", "model=o"]) == [("model=odd", "\\x1b[31mred\\ttab")]


def test_a_folder_that_may_not_be_read_has_nothing_to_offer(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    assert words_for("plan", "--out", "secret/") == []
    assert words_for("plan", "--out", "nul\0/") == []


def test_hidden_names_are_offered_where_a_dot_is_typed():
    touch(".hidden", "seen")
    assert words_for("plan", "--out", "") == ["seen"]
    assert words_for("plan", "--out", ".h") == [".hidden"]


# Settings


def test_every_setting_is_a_key():
    assert words_for("plan", "parallel.") == [
        f"parallel.{name}{end}"
        for name in field_types(ParallelConfig)
        for end in ((".",) if name == "schedule_options" else ("=",))
    ]
    top = {word.rstrip(".=") for word in words_for("plan", "quickstart", "")}
    assert top == {*field_types(LaunchConfig)}
    assert words_for("plan", "cluster.intra_node.l") == ["cluster.intra_node.latency_s="]
    assert words_for("plan", "seed.") == words_for("plan", "no.such.") == []
    assert [word for word in words_for("bench", "collectives", "") if word[0] in "mce"] == [
        *("cluster.", "cluster=", "executor.", "executor=")
    ]


def test_a_key_may_be_added_or_taken_out():
    assert words_for("plan", "+seed") == ["+seed="]
    assert words_for("plan", "++parallel.tp") == ["++parallel.tp="]
    assert words_for("plan", "~parallel.tp") == ["~parallel.tp"]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("parallel.schedule=", [*sorted(registry.plugins("launcher.schedules"))]),
        ("precision.compute=", ["fp32", "bf16", "fp16"]),
        ("parallel.dp=", ["auto"]),
        ("parallel.recompute=", ["none", "selective", "full"]),
        ("fusion.optimizer=f", ["fused", "foreach"]),
        ("train.async_checkpoint=", ["true", "false"]),
        ("optim.clip_norm=", ["null"]),
        ("train.num_steps=", []),
        ("model=gpt2", ["gpt2_124m"]),
        ("model=tiny,gpt2", ["tiny,gpt2_124m"]),
        ("+site=b", ["box"]),
        ("no.such=", []),
    ],
)
def test_values_are_those_that_the_setting_allows(word, values):
    key = word.partition("=")[0]
    assert sorted(words_for("sweep", "plan", word)) == sorted(f"{key}={value}" for value in values)


def test_a_choice_beside_the_recipe_or_in_the_own_folder_is_known(tmp_path):
    touch("lab/model/mine.yaml", "lab/r.yaml", tmp_path / "config/trireme/site/alps.yaml")
    assert words_for("plan", "lab/r.yaml", "model=mi") == ["model=mine"]
    assert words_for("plan", "model=mi") == []
    assert words_for("plan", "site=") == ["site=alps", "site=box", "site=none"]


def test_options_are_those_of_the_plugin_that_is_chosen_before():
    assert "executor.continuation=" in words_for("plan", "executor.")
    assert "executor.continuation=" in words_for("plan", "executor=slurm", "executor.")
    assert words_for("plan", "executor=torchrun", "executor.c") == []
    chosen = "parallel.schedule=interleaved_1f1b"
    assert words_for("plan", chosen, "parallel.schedule_options.") == [
        "parallel.schedule_options.uneven_groups="
    ]


def test_a_plugin_that_cannot_be_imported_only_lacks_its_options(monkeypatch):
    broken = registry.PluginRecord(
        group="launcher.executors", name="broken", distribution="x", version="1", target="no_such_module:X"
    )
    known = registry.plugins("launcher.executors")
    monkeypatch.setattr(registry, "plugins", lambda group: {"broken": broken, **known})
    assert "executor.continuation=" in words_for("plan", "executor.")


def test_settings_that_name_a_run_or_a_folder_are_completed_as_such():
    touch("runs/one/job.json", "text/a.txt")
    assert words_for("plan", "report.baseline=") == [
        *("report.baseline=auto", "report.baseline=none", "report.baseline=runs/", "report.baseline=text/")
    ]
    assert words_for("plan", "device.measured_in=runs/") == ["device.measured_in=runs/one"]
    assert words_for("plan", "data.source=text/") == ["data.source=text/a.txt"]


# bash's quoting


@pytest.mark.parametrize(
    ("text", "words", "kept"),
    [
        ("trireme ", ["trireme", ""], 0),
        ("trireme  plan  a", ["trireme", "plan", "a"], 0),
        ("trireme a=b:c", ["trireme", "a=b:c"], 4),
        (r"trireme a\=b\ c", ["trireme", "a=b c"], 0),
        ('trireme "a $b', ["trireme", "a $b"], 0),
        (r'trireme "a\$b\c', ["trireme", r"a$b\c"], 0),
        ("trireme 'a\\", ["trireme", "a\\"], 0),
        ("trireme x='a b'c", ["trireme", "x=a bc"], 5),
        ("trireme ''", ["trireme", ""], 0),
        ("trireme '' ", ["trireme", "", ""], 0),
    ],
)
def test_a_line_is_read_as_bash_reads_it(text, words, kept):
    line = read_line(text)
    assert (line.words, line.kept) == (words, kept)


def test_without_a_break_at_the_equals_sign_the_whole_word_is_replaced():
    line = read_line("trireme model=g", " \t\n")
    assert list(replies(line, ["model=gpt"])) == ["model=gpt"]


@pytest.mark.parametrize("typed", ["", "'", '"'])
@pytest.mark.parametrize(
    "name", ["a b", "$(x)", "`x`", "it's", 'say "x"', "a;b&c|d", "back\\slash", "*?[a]", "ä!", "~x"]
)
def test_bash_reads_a_reply_as_the_name_itself(typed, name):
    line = read_line(f"trireme {typed}")
    (reply,) = replies(line, [name])
    done = subprocess.run(
        ["bash", "-c", f"printf %s {typed}{reply}{typed}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == name


# The verb


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell, capsys):
    assert run_verb("completion", [shell]) == 0
    assert f"trireme __complete {shell}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"trireme completion takes one shell: bash, zsh, fish\."),
        (["bash", "zsh"], r"trireme completion takes one shell: bash, zsh, fish\."),
        (["bsah"], r"completion bsah: no such shell\. Did you mean bash\?"),
    ],
)
def test_one_known_shell_is_to_be_named(words, message):
    with pytest.raises(LauncherError, match=message):
        run_verb("completion", words)


def test_answers_are_lines_with_what_each_means_or_what_bash_inserts(capsys):
    touch("my recipe.yaml")
    assert main(["__complete", "zsh", "recipe", "sh"]) == 0
    assert capsys.readouterr().out == "show\t\n"
    assert main(["__complete", "fish", "plan", "my\\ "]) == 0
    assert capsys.readouterr().out == "my recipe.yaml\t\n"
    assert answer(["bash", "trireme plan my", " =:"]) == 0
    assert capsys.readouterr().out == "my\\ recipe.yaml\n"
    assert answer(["bash", "trireme no_such "]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [[], ["bash"]])
def test_without_words_there_is_nothing_to_answer(words):
    with pytest.raises(LauncherError, match=r"asked by the scripts of trireme completion: bash, zsh"):
        answer(words)


def test_what_a_plugin_prints_is_no_answer(tmp_path):
    code = (
        "import sys; from launcher.base import registry; load = registry.load;"
        "registry.load = lambda *names: print('noise') or load(*names);"
        "from launcher.cli.main import main; main(['__complete', 'zsh', 'plan', 'executor.starter'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "executor.starter=\t\n"
    assert "noise" in done.stderr
