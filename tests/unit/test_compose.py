import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.base import registry, resources
from launcher.base.errors import ConfigError, LauncherError, as_override
from launcher.contract.config import LaunchConfig
from launcher.typed.read import field_types, plain
from tests.helpers.configs import compose_sound

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files into an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        return path

    return write_file


def refused(recipe: str, *words: str) -> str:
    with pytest.raises(LauncherError) as caught:
        compose_sound(recipe, words)
    return str(caught.value)


BASED = "defaults:\n  - /base\n  - _self_\nbatch: {global_size: 8, seq_length: 64}\n"


# Provenance


def test_every_value_of_a_recipe_has_a_source() -> None:
    composed = compose_sound("quickstart")
    assert composed.values["parallel"]["pp"] == 2
    assert composed.sources["parallel.pp"].where.startswith("recipes/quickstart.yaml:")
    assert composed.sources["model.num_layers"].where.startswith("conf/model/tiny.yaml:")
    assert composed.sources["model.dropout"].where.startswith("conf/model/gpt.yaml:")
    assert all(source.where for source in composed.sources.values())


def test_source_names_the_line_of_the_value(write: Write) -> None:
    write("ours.yaml", BASED + "\nparallel:\n\n  tp: 4\noptim:\n  betas: [0.8,\n    0.9]\n")
    sources = compose_sound("./ours.yaml").sources
    assert sources["parallel.tp"].where == "ours.yaml:8"
    assert sources["optim.betas"].where == "ours.yaml:10"
    assert sources["optim.betas[1]"].where == "ours.yaml:11"
    assert sources["batch.global_size"].where == "ours.yaml:4"


def test_what_one_recipe_changes_in_shipped_files_is_not_there_in_the_next() -> None:
    words = ("site.env={A: b}", "optim.betas=[0.1,0.2]", "parallel=interleaved", "~data.cache_dir")
    before = compose_sound("quickstart")
    assert compose_sound("quickstart", words).values != before.values
    assert compose_sound("quickstart") == before


def test_a_shipped_file_that_was_changed_is_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = resources.folder("conf")
    shutil.copytree(folder, tmp_path / "conf")
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "launcher")
    shutil.copytree(folder.parent / "recipes", tmp_path / "recipes")
    assert compose_sound("quickstart").values["optim"]["eps"] == 1e-8
    file = tmp_path / "conf" / "optim" / "adamw.yaml"
    file.write_text(file.read_text().replace("1.0e-8", "1.0e-7").replace("1e-8", "1e-7"))
    assert compose_sound("quickstart").values["optim"]["eps"] == 1e-7


def test_override_is_the_source_of_what_it_sets() -> None:
    composed = compose_sound("quickstart", ["parallel.tp=4", "optim.betas=[0.8,0.9]", "optim.betas.1=0.99"])
    assert composed.sources["parallel.tp"].where == "override parallel.tp=4"
    assert composed.sources["optim.betas[0]"].where == "override optim.betas=[0.8,0.9]"
    assert composed.sources["optim.betas[1]"].where == "override optim.betas.1=0.99"
    assert composed.values["optim"]["betas"] == [0.8, 0.99]


def test_group_override_swaps_the_file() -> None:
    composed = compose_sound("quickstart", ["model=llama3_8b"])
    assert composed.values["model"]["hidden_size"] == 4096
    assert composed.sources["model.hidden_size"].where.startswith("conf/model/llama3_8b.yaml:")


def test_name_follows_the_file_unless_given(write: Write) -> None:
    write("my run copy.yaml", "seed: 0\n")
    assert compose_sound("./my run copy.yaml").values["name"] == "my_run_copy"
    assert compose_sound("./my run copy.yaml").sources["name"].where == "the recipe's file name"
    assert compose_sound("./my run copy.yaml", ["name=ours"]).values["name"] == "ours"


def test_value_that_a_file_leaves_open_is_absent() -> None:
    composed = compose_sound("quickstart", ["data=text"])
    assert "source" not in composed.values["data"]
    assert composed.sources["data.source"].where.startswith("conf/data/text.yaml:")


def test_text_of_a_source_always_says_the_value() -> None:
    composed = compose_sound("quickstart", ["seed=${train.num_steps}", "parallel.tp.x=3"])
    assert composed.values["seed"] == composed.values["train"]["num_steps"]
    assert composed.sources["seed"].text == "150"
    assert composed.sources["parallel.tp"].text is None
    assert composed.sources["parallel.tp"].where == "override parallel.tp.x=3"


# One spelling, one meaning


@pytest.mark.parametrize(
    "text",
    ["1e-5", "1.0e-05", "010", "08", "no", "on", "12:30:00", "1:30", "22:22", "1e5", "null", "true"],
)
def test_text_means_the_same_in_yaml_and_on_the_command_line(write: Write, text: str) -> None:
    write("ours.yaml", f"executor: {{x: {text}, y: [{text}]}}\n")
    in_yaml = compose_sound("./ours.yaml")
    write("bare.yaml", "seed: 0\n")
    given = compose_sound("./bare.yaml", [f"executor.x={text}", f"executor.y=[{text}]"])
    for path, key in (("executor.x", "x"), ("executor.y[0]", "y")):
        assert given.values["executor"][key] == in_yaml.values["executor"][key]
        assert given.sources[path].text == in_yaml.sources[path].text == text


def test_leading_zeros_survive_in_a_list(write: Write) -> None:
    write("ours.yaml", BASED + "executor: {nodes: [01, 02, 03]}\n")
    assert compose_sound("./ours.yaml").values["executor"]["nodes"] == ["01", "02", "03"]
    assert compose_sound("quickstart", ["executor.nodes=[01,02,03]"]).values["executor"]["nodes"] == [
        "01",
        "02",
        "03",
    ]


def test_yaml_keys_stay_as_written(write: Write) -> None:
    write("ours.yaml", "parallel: {on: 1}\nno: 3\n")
    composed = compose_sound("./ours.yaml")
    assert composed.values["parallel"] == {"on": 1}
    assert composed.values["no"] == 3
    assert composed.sources["no"].where == "ours.yaml:2"


def test_quoted_scalar_is_text_without_a_text_of_its_own(write: Write) -> None:
    write("ours.yaml", "seed: '4'\n")
    for composed in (compose_sound("./ours.yaml"), compose_sound("./ours.yaml", ["seed='4'"])):
        assert composed.values["seed"] == "4"
        assert composed.sources["seed"].text is None


def test_carriage_returns_change_nothing(write: Write) -> None:
    write("ours.yaml", "seed: 7\r\nname: ours\r\n")
    composed = compose_sound("./ours.yaml", ["parallel.tp=4\r"])
    assert composed.values == {"seed": 7, "name": "ours", "parallel": {"tp": 4}}


# Overrides


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ("run.dir=a.b@example.org", "dir", "a.b@example.org"),
        ("run.dir=/d/shard-??.bin", "dir", "/d/shard-??.bin"),
        ("run.dir=a b", "dir", "a b"),
        ("run.dir='a;rm -rf /'", "dir", "a;rm -rf /"),
        ('run.dir="ckpt/epoch=9-step=100.ckpt"', "dir", "ckpt/epoch=9-step=100.ckpt"),
        ('run.dir="a#b"', "dir", "a#b"),
        ("+run.extra=['a\\\\','b']", "extra", ["a\\", "b"]),
        ("++run.dir=x", "dir", "x"),
        ("run={dir: x}", "dir", "x"),
        ("run.dir=${name}/x", "dir", "bare/x"),
    ],
)
def test_override_is_accepted(write: Write, word: str, path: str, value: object) -> None:
    write("bare.yaml", "run: {dir: null}\n")
    assert compose_sound("./bare.yaml", [word]).values["run"][path] == value


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "run.dir=ckpt/epoch=9-step=100.ckpt",
            "If it is one text, paste 'run.dir=\"ckpt/epoch=9-step=100.ckpt\"'.",
        ),
        ("run.dir=a#b", "If it is one text, paste 'run.dir=\"a#b\"'."),
        ("run.dir=node[01-03,07]", "If it is one text, paste 'run.dir=\"node[01-03,07]\"'."),
        (r"\parallel.tp=4", "starts with a backslash, as when a line continuation is pasted."),
        (r"\parallel.tp=4", "Give parallel.tp=4."),
        ("parallel.tp:=4", "parallel.tp:=4: has a stray colon before the =. Give parallel.tp=4."),
        ("parallel.tp=", "parallel.tp=(nothing): has no value after the =. Give parallel.tp=VALUE."),
        ("run.dir=", "Give run.dir=VALUE, or run.dir=null for no value."),
        ("parallel.tp", "an override is written key=value. Give parallel.tp=VALUE."),
        ("=4", "an override is written key=value. Give KEY=4."),
        ("a b=4", "a b=4: is not a valid key: letters, digits and _, joined by dots."),
        ("parallel.tp=1,2", "parallel.tp=1,2: these are several values, and one run takes one. "
         "Give one value, or use trireme sweep."),
        ("parallel.tp=choice(1,2)", "these are several values, and one run takes one. Give one value, "
         "or use trireme sweep."),
        ("run.dir=node01,node02", "One text is written 'run.dir=\"node01,node02\"'."),
        ("+parallel.tp=4", "is set already, and + only adds. Give parallel.tp=4."),
        ("~parallel.tpp", "parallel.tpp=(missing): there is nothing to delete. Did you mean tp?"),
        ("model=lama3_8b", "model=lama3_8b: no such file in the group model. Did you mean llama3_8b? "
         "[override model=lama3_8b]"),
        ("model=null", "model=null: must name a file of the group. Known: custom, gpt,"),
        ("model@foo=tiny", "model@foo=tiny: files of a group are always placed at the path of the group. "
         "Give model=tiny."),
        ("run.dir=${nam}", "run.dir=${nam}: there is no setting nam."),
        ("run.dir=x${run.dir}", "run.dir=x${run.dir}: refers to itself."),
    ],
)  # fmt: skip
def test_override_is_refused_with_what_to_write(word: str, message: str) -> None:
    assert message in refused("quickstart", word)


def test_every_bad_override_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_sound("quickstart", ["a#b=1", "parallel.tp=1,2", "parallel.pp=2", "parallel.dp:=3"])
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize(
    "value", ["a=b", "a#b", "it's", 'say "hi"', "back\\", '\\"', "x[1,", "{", "a: b, c", "(x)", "ü é"]
)
def test_pasted_suggestion_gives_the_text_itself(write: Write, value: str) -> None:
    write("bare.yaml", "run: {dir: null}\n")
    (word,) = shlex.split(as_override("run.dir", value))
    assert compose_sound("./bare.yaml", [word]).values["run"]["dir"] == value


def test_deleted_setting_keeps_the_override_as_its_source() -> None:
    composed = compose_sound("quickstart", ["~parallel.tp"])
    assert "tp" not in composed.values["parallel"]
    assert composed.sources["parallel.tp"].where == "override ~parallel.tp"


# Secrets and hidden files


@pytest.mark.parametrize(
    "word", ["run.dir=${oc.env:HOME}", "+run.x=[${oc.env:HOME}]", "+run.x=${oc.env:NONE,a}"]
)
def test_environment_value_in_an_override_is_refused(word: str) -> None:
    assert "Give the name of the variable; the ranks read it." in refused("quickstart", word)


def test_environment_value_in_a_file_is_refused_with_its_line(write: Write) -> None:
    write("ours.yaml", BASED + "executor:\n  key: ${oc.env:WANDB_API_KEY}\n")
    message = refused("./ours.yaml")
    assert (
        "executor.key=${oc.env:WANDB_API_KEY}: the value of an environment variable would be written"
        in message
    )
    assert message.endswith("[ours.yaml:6]")


def test_configuration_in_the_home_folder_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (".config/trireme", ".config/hydra", ".hydra", "conf"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.yaml").write_text("parallel: {tp: 8}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    monkeypatch.chdir(tmp_path)
    assert compose_sound("quickstart").values["parallel"]["tp"] == 1


# Recipes outside of the repository


def test_recipe_by_path_sees_shipped_and_own_groups(write: Write) -> None:
    write("ours/model/mine.yaml", "defaults: [gpt, _self_]\nname: mine\nnum_layers: 6\n")
    write("ours/run.yaml", "defaults:\n  - /base\n  - override /model: mine\n  - override /precision: bf16\n")
    composed = compose_sound("ours/run.yaml")
    assert composed.values["model"]["num_layers"] == 6
    assert composed.sources["model.num_layers"].where == "ours/model/mine.yaml:3"
    assert composed.values["precision"]["compute"] == "bf16"
    assert composed.recipe_path == "ours/run.yaml"
    assert composed.notes == ()


def test_recipe_by_path_may_extend_a_shipped_recipe(write: Write) -> None:
    write("ours.yaml", "defaults: [/quickstart, _self_]\nseed: 5\n")
    composed = compose_sound("./ours.yaml")
    assert (composed.values["seed"], composed.values["parallel"]["pp"]) == (5, 2)


def test_recipe_without_self_is_merged_after_its_defaults(write: Write) -> None:
    write("ours.yaml", "defaults: [/base]\nseed: 5\n")
    assert compose_sound("./ours.yaml").values["seed"] == 5


def test_own_file_that_hides_a_shipped_one_is_named(write: Write) -> None:
    write("ours/precision/fp32.yaml", "name: ours\n")
    write("ours/run.yaml", BASED)
    composed = compose_sound("ours/run.yaml")
    assert composed.values["precision"]["name"] == "ours"
    assert composed.notes == ("ours/precision/fp32.yaml is used and hides conf/precision/fp32.yaml",)


def test_own_base_beside_a_recipe_is_refused_and_named(write: Write) -> None:
    write("ours/base.yaml", "seed: 3\n")
    write("ours/run.yaml", BASED)
    assert refused("ours/run.yaml") == (
        "defaults=/base: ours/base.yaml has the name of the launcher's own base, which chooses a file of "
        "every group. Rename it, and where it is extended."
    )


def test_self_may_stand_before_the_choice_of_a_file(write: Write) -> None:
    write("ours.yaml", "defaults: [/base, _self_, override /model: llama3_8b]\nseed: 3\n")
    assert compose_sound("./ours.yaml").values["seed"] == 3


def test_shipped_recipe_wins_over_a_file_of_its_name_and_says_so(write: Write) -> None:
    write("quickstart.yaml", BASED)
    (note,) = compose_sound("quickstart").notes
    assert (
        "quickstart.yaml is used, and ./quickstart.yaml is not; give ./quickstart.yaml for that one" in note
    )
    assert compose_sound("./quickstart.yaml").values["parallel"]["pp"] == 1


@pytest.mark.parametrize(
    "folder", ["with space", "quo'te", 'dou"ble', "semi;colon", "ünïcode", "a=b", "a@b", "${x}"]
)
def test_recipe_in_a_folder_of_any_name(write: Write, folder: str) -> None:
    write(f"{folder}/ours.yaml", "name: ours\nseed: 3\n")
    composed = compose_sound(f"{folder}/ours.yaml")
    assert composed.values["seed"] == 3
    assert composed.sources["seed"].where == f"{folder}/ours.yaml:2"


def test_unknown_recipe_names_the_nearest() -> None:
    assert refused("quikstart") == "no shipped recipe is called 'quikstart'. Did you mean quickstart?"


def test_missing_file_is_named() -> None:
    assert refused("./nope.yaml").startswith("no recipe file at ./nope.yaml.")


def test_file_given_without_its_path_is_hinted(write: Write) -> None:
    write("ours.yaml", BASED)
    assert refused("ours").endswith("A file is given by its path: ./ours.yaml.")


# Broken files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "b.c=(twice): is set twice in one group, first in line 3. Remove one. "
         "[ours.yaml:4]"),
        ("a: [1\nb", "ours.yaml:3: not YAML: did not find expected ',' or ']'"),
        ("a: 1\n\tb: 2\n", "ours.yaml:2: not YAML: it has a tab, and YAML is indented by spaces. Replace"),
        ("a:\n  b: 1\n\tc: 2\n", "ours.yaml:3: not YAML: it has a tab"),
        ("a:\t\n- b\n\t- c\n", "ours.yaml:3: not YAML: it has a tab"),
        ("a: *.txt\n", "ours.yaml:1: not YAML: a * in front makes an alias of a text. Write a text "
         'like *.txt in quotes: "*.txt".'),
        ("a: *b\n", "ours.yaml:1: not YAML: a * in front makes an alias of a text."),
        ("a: @b\n", "ours.yaml:1: not YAML: a text cannot begin with @. Write it in quotes."),
        ('a: "\\${B}"\n', "ours.yaml:1: not YAML: in double quotes a \\ begins an escape. Write the text in"),
        ("a: b: c\n", "ours.yaml:1: not YAML: a second colon in one line. Write a text that"),
        ("a: http://b: c\n", "ours.yaml:1: not YAML: a second colon in one line."),
        ("a:\n  b: c: d\n", "ours.yaml:2: not YAML: a second colon in one line."),
        ("a: 1\n  b: 2\n", "ours.yaml:2: not YAML: it is indented further than the line before. Give both"),
        ("a:\n  b: c\n    d: e: f\n", "ours.yaml:3: not YAML: it is indented further than the line before."),
        ("defaults: [_self_, /base]\nseed: 3\n", "defaults[1]=/base: comes after _self_, so its values would "
         "take the place of those that this file sets. Put _self_ last. [ours.yaml:1]"),
        ("a: 1\n---\nb: 1\n", "ours.yaml:2: not YAML: but found another document"),
        (
            "a: !!int 3\n",
            "a=tag:yaml.org,2002:int: YAML tags are not supported. Remove the tag. [ours.yaml:1]",
        ),
        ("a: !!python/object/apply:os.system ['id']\n", "YAML tags are not supported"),
        ("? [a]\n: 3\n", "?=sequence: a key must be a scalar. Write a name. [ours.yaml:1]"),
        ("- 3\n", "ours.yaml: must consist of key: value lines, not a list"),
        ("a: &x [*x]\n", "is nested more than 20 deep, as an alias inside of its own anchor is. "
         "Write it flatter. [ours.yaml:1]"),
        ("# @package a b c\na: 1\n", "ours.yaml: cannot be read: Too many components"),
        ("defaults: 3\n", "defaults=3: must be a list of files. "
         "Write `defaults: [/base, override /model: tiny, _self_]`. [ours.yaml:1]"),
        ("defaults: [/bass]\n", "defaults=bass: no such file. Did you mean base? [ours.yaml:1]"),
        ("defaults:\n  - /base\n  - override /model: tinny\n",
         "model=tinny: no such file in the group model. "
         "Did you mean tiny? [ours.yaml:3]"),
        ("defaults:\n  - /base\n  - override /modl: tiny\n",
         "defaults=modl: no group of this name is selected. "
         "Did you mean model? [ours.yaml:3]"),
        ("defaults: [/base, ours]\n", "ours.yaml: its defaults list includes itself"),
        ("defaults: [/base]\nrun: {dir: '${nam}'}\n", "there is no setting nam. Refer to a setting that has "
         "a value. [ours.yaml:2]"),
    ],
)  # fmt: skip
def test_broken_file_is_refused_with_its_line(write: Write, text: str, message: str) -> None:
    write("ours.yaml", text)
    assert message in refused("./ours.yaml")


def test_file_of_another_encoding_is_refused(write: Write) -> None:
    write("ours.yaml", "").write_bytes(b"a: \xff\xfe\n")
    assert "ours.yaml: cannot be read: not UTF-8 text" in refused("./ours.yaml")


def test_empty_file_composes_to_its_name_alone(write: Write) -> None:
    write("ours.yaml", "")
    assert compose_sound("./ours.yaml").values == {"name": "ours"}


# Cost


def test_compose_imports_no_torch_and_scans_no_plugins() -> None:
    code = (
        "import sys; from launcher.config.compose import compose; compose('quickstart', ['parallel.tp=2']);"
        "from hydra.core.plugins import Plugins; from hydra.core.singleton import Singleton;"
        "print('torch' in sys.modules, Plugins in Singleton._instances)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.split() == ["False", "False"]


def test_base_chooses_of_every_group() -> None:
    groups = {folder.name for folder in resources.folder("conf").iterdir() if folder.is_dir()}
    base = (resources.folder("conf") / "base.yaml").read_text()
    assert groups == set(re.findall(r"^  - (\w+): ", base, re.MULTILINE))


# Defaults, which a plan of an earlier version is read with, and which conf/ gives to a new one


def defaults(cls: type) -> dict[str, Any]:
    """The fields of a settings class that have a default, with its plain value."""
    fields = dataclasses.fields(cls)
    found = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    made = {f.name: f.default_factory for f in fields if f.default_factory is not dataclasses.MISSING}
    return plain(found | {name: factory() for name, factory in made.items()})


def test_the_defaults_of_the_schema_are_those_of_conf(write: Write) -> None:
    write("ours.yaml", BASED)
    values = compose_sound("./ours.yaml").values
    groups = {
        name: kind
        for name, kind in field_types(LaunchConfig).items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    compared = 0
    for group, kind in groups.items():
        if group in ("cluster", "device"):  # whose files describe hardware
            continue
        for name, default in defaults(kind).items():
            assert values[group].get(name, default) == default, f"{group}.{name}"
            compared += name in values[group]
    assert compared > 30


@pytest.mark.parametrize("group", ["architecture", "executor"])
def test_the_defaults_of_a_plugin_are_those_of_its_file(write: Write, group: str) -> None:
    write("ours.yaml", BASED)
    files = sorted((resources.folder("conf") / group).glob("*.yaml"))
    assert len(files) > 1
    for file in files:
        values = compose_sound("./ours.yaml", [f"{group}={file.stem}"]).values[group]
        plugin = registry.resolve(registry.record(f"launcher.{group}s", values["name"]).target)
        expected = defaults(plugin.Config) if getattr(plugin, "Config", None) else {}
        assert {name: value for name, value in values.items() if name != "name"} == expected, file.stem
