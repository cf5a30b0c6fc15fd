"""What a person may type or paste that cannot be composed: refused in our own words, all at once."""

import os
import re
from pathlib import Path

import pytest

from launcher.base.errors import ConfigError, LauncherError
from launcher.config.compose import compose
from launcher.config.recipes import find
from tests.helpers.configs import compose_sound


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """Composes a recipe of this text; gives the refusal."""
    monkeypatch.chdir(tmp_path)

    def refused(text, *words):
        Path("ours.yaml").write_text(text)
        with pytest.raises(LauncherError) as caught:
            compose_sound("./ours.yaml", words)
        return str(caught.value)

    return refused


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("~", "(nothing)=(nothing): an override is written key=value. Give KEY=VALUE."),
        ("+=3", "(nothing)=3: an override is written key=value. Give KEY=3."),
        ("parallel.tp:4", "parallel.tp:4=(nothing): has a colon in place of =. Give parallel.tp=4."),
        ("parallel.tp: 4", "has a colon in place of =. Give parallel.tp=4."),
        ("parallel:tp=4", "parallel:tp=4: the parts of a key are joined by dots. Give parallel.tp=4."),
        (" parallel.tp=4", "joined by dots. Give parallel.tp=4."),
        ("parallel.tp =4", "joined by dots. Give parallel.tp=4."),
        (".parallel.tp=4", "joined by dots. Give parallel.tp=4."),
        ("/model=tiny", "joined by dots. Give model=tiny."),
        ("optim.betas[0]=.5", "joined by dots. Give optim.betas.0=.5."),
        ("@=3", "@=3: is not a valid key: letters, digits and _, joined by dots."),
        ("parallel.tp==4", "parallel.tp==4: a value does not begin with =. Give parallel.tp=4."),
        ("run.dir=[1,[2", "cannot be parsed as an override: [ and ] are not balanced."),
        ("run.dir='x", "cannot be parsed as an override: a ' is not closed."),
        ("run.dir=['a\\','b']", "cannot be parsed as an override: a quote after a \\ belongs to the text."),
        (
            "run.dir=a=b",
            "cannot be parsed as an override: = has a special meaning. If it is one text, paste",
        ),
        ("run.dir={a: b,}", "cannot be parsed as an override: it does not follow the grammar."),
        ("run.dir=foo(4)", "cannot be parsed as an override: it calls a function."),
        ("+x=" + "[" * 300 + "]" * 300, "]]]: is nested more than 20 deep. Give a flatter value."),
        ("++model=gpt", "model=gpt: a file of a group is selected without ++. Give model=gpt."),
        ("~model=gpt", "model=gpt: no such file is selected, so there is nothing to delete. Leave it out."),
        ("model=???", "model=???: no such file in the group model. Known: custom, gpt,"),
        ("model=LLAMA3_8B", "no such file in the group model. Did you mean llama3_8b?"),
        ("device=gpu", "device=gpu: no such file in the group device. Known: a100_80gb, b200, cpu,"),
        ("run=[1]", "run=[1]: a list cannot replace a group of settings, nor a group a list."),
        ("optim.betas.5=1", "the list has fewer items. Its indices start at 0; or give the whole list."),
        ("optim.betas.x=1", "an index of a list is a number. Indices start at 0; or give the whole list."),
        (
            "~optim.betas.0",
            "optim.betas.0=(missing): an item of a list cannot be deleted. Give the whole list.",
        ),
        ("a@b=3", "a@b=3: there is no group of this name. Leave out what follows the @."),
        ("~run.root=x", "run.root=x: has another value, so it is not deleted. Give ~run.root to delete"),
        ("name=${nope}", "name=${nope}: there is no setting nope. Refer to a setting that has a value."),
        ("run.dir=${run}", "run.dir=${run}: refers to itself."),
        ("run.dir=${train.num_steps.x}", "run.dir=${train.num_steps.x}: does not refer to a setting."),
        ("run.dir=${a b}", "run.dir=${a b}: does not refer to a setting. Write ${group.setting}."),
        ("name=${now:%Y}", "calls a function; only other settings can be referred to."),
    ],
)
def test_a_word_is_refused_in_our_own_words(word, message):
    with pytest.raises(ConfigError) as caught:
        compose_sound("quickstart", [word])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parallel.tp: 2\n", "parallel.tp=2: in a file, keys are nested, not dotted. "
         "Nest it: parallel: {tp: 2}. [ours.yaml:1]"),
        ("x: &x {a: 1}\nmodel:\n  <<: *x\n", "model.<<=(merge): merge keys are not supported. "
         "Write the keys out, or put them into a file of `defaults`. [ours.yaml:3]"),
        ("defaults: null\n", "defaults=null: must be a list of files. Write `defaults: ["),
        ("defaults: [/base, null]\n", "defaults[1]=null: must be the name of a file, or `group: name`."),
        ("defaults: [{a: 3}]\n", "defaults[0]={'a': 3}: must be the name of a file, or `group: name`."),
        ("defaults: [/base, _self_, _self_]\n", "defaults[2]=_self_: is listed twice. Remove one."),
        ("# @package foo\ndefaults: [/base]\n", "puts its settings below foo. Remove it."),
        ("hello\n", "ours.yaml: must consist of key: value lines, not a single value"),
        ("a: " + "[" * 30 + "]" * 30, "is nested more than 20 deep"),
        ("defaults: [/base]\nmodel: [a]\n", "two of its files have a list and a group of settings"),
    ],
)  # fmt: skip
def test_a_file_is_refused_in_our_own_words(ours, text, message):
    assert message in ours(text)


def test_aliases_that_multiply_are_refused_before_they_fill_the_memory(ours):
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    message = ours("\n".join(lines))
    assert "the file holds more than 10,000 values, those of its aliases counted. Use fewer." in message
    assert len(message) < 300


def test_faults_of_words_choices_changes_and_interpolations_come_together():
    words = ["a#b=1", "model=lama3_8b", "~parallel.tpp", "run.dir=${nope}", "name=${nay}", "parallel.tp=1,2"]
    faults = compose("quickstart", words).faults
    paths = ["a#b", "parallel.tp", "model", "parallel.tpp", "name", "run.dir"]
    assert [fault.path for fault in faults] == paths
    with pytest.raises(ConfigError, match=r"^6 faults:"):
        compose_sound("quickstart", words)


def test_a_missing_file_does_not_hide_the_words_that_cannot_be_read(ours):
    message = ours("defaults: [/bass]\n", "parallel.tp=1,2")
    assert "parallel.tp=1,2" in message
    assert "Did you mean base?" in message


def test_what_cannot_be_used_is_not_in_the_draft():
    composed = compose("quickstart", ["parallel.tp=1,2", "parallel.pp=4", "model=lama"])
    assert (composed.values["parallel"]["tp"], composed.values["parallel"]["pp"]) == (1, 4)
    assert composed.values["model"]["name"] == "tiny"


def test_a_deleted_setting_that_was_null_is_gone_like_any_other():
    composed = compose_sound("quickstart", ["~run.dir"])
    assert "dir" not in composed.values["run"]
    assert composed.sources["run.dir"].where == "override ~run.dir"


def test_line_ends_of_pasted_words_change_nothing():
    composed = compose_sound("quickstart\r\n", ["parallel.tp=4\r\n", "parallel.pp=1\n"])
    assert (composed.values["parallel"]["tp"], composed.values["parallel"]["pp"]) == (4, 1)


@pytest.mark.parametrize("word", ["x" * 300, "x" * 300 + ".yaml", "./" + "x" * 300, "a\0b", "./a\0b"])
def test_a_name_that_no_file_can_have_is_an_unknown_recipe(word):
    with pytest.raises(LauncherError, match=r"^no (shipped )?recipe"):
        find(word)


def test_a_recipe_may_end_in_yml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ours.yml").write_text("seed: 3\n")
    assert compose_sound("ours.yml").values == {"seed": 3, "name": "ours"}
    with pytest.raises(LauncherError, match=r"A file is given by its path: \./ours\.yml\."):
        find("ours")


def test_the_note_of_a_hidden_recipe_is_kept_when_composing_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text("defaults: [/base]\n")
    with pytest.raises(LauncherError) as caught:
        compose_sound("quickstart", ["~model=gpt"])
    (note,) = caught.value.__notes__
    assert re.search(r"is used, and \./quickstart\.yaml is not", note)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_holds_no_recipe(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(LauncherError, match="no recipe file at"):
        find(f"{tmp_path}/closed/ours.yaml")
