import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.base.errors import ConfigError
from launcher.base.redaction import shortened
from launcher.config.compose import Composed, compose
from launcher.config.load import load
from launcher.config.save import dump, scalar_text
from launcher.typed.read import Source, plain
from tests.helpers.configs import compose_sound


@pytest.fixture(scope="module")
def quickstart() -> Composed:
    return compose_sound("quickstart")


def with_value(composed: Composed, path: str, value: Any) -> dict[str, Any]:
    """The composed values with another one at a path."""
    values = copy.deepcopy(dict(composed.values))
    group = values
    *outer, key = path.split(".")
    for name in outer:
        group = group[name]
    group[key] = value
    return values


def faults(composed: Composed, path: str, value: Any) -> list[str]:
    """The faults of the quickstart with another value, as set on line 3 of a recipe."""
    sources = {**composed.sources, path: Source(where="ours.yaml:3")}
    with pytest.raises(ConfigError) as caught:
        load(with_value(composed, path, value), sources)
    return [str(fault) for fault in caught.value.faults]


def test_quickstart_loads(quickstart: Composed) -> None:
    config = load(quickstart.values, quickstart.sources)
    assert (config.name, config.parallel.pp, config.optim.options["betas"]) == ("quickstart", 2, [0.9, 0.95])
    assert config.executor.name == "torchrun"
    assert config.executor.options == {"max_restarts": 0, "save_wait_s": 600}


def test_every_fault_is_reported_at_once_with_its_place(quickstart: Composed) -> None:
    values = with_value(quickstart, "parallel.tp", 0)
    values["optim"]["lr"] = float("nan")
    values["paralell"] = {"tp": 2}
    sources = {**quickstart.sources, "paralell": Source(where="ours.yaml:9")}
    sources |= {"parallel.tp": Source(where="override parallel.tp=0", text="0")}
    sources |= {"optim.lr": Source(where="ours.yaml:4", text="nan")}
    with pytest.raises(ConfigError) as caught:
        load(values, sources)
    assert str(caught.value).splitlines() == [
        "3 faults:",
        "  1. paralell={'tp': 2}: not a setting here. Did you mean parallel? [ours.yaml:9]",
        "  2. optim.lr=nan: must be a finite number above 0. [ours.yaml:4]",
        "  3. parallel.tp=0: must be a whole number of at least 1. Write 1. [override parallel.tp=0]",
    ]


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("../x", "x"),
        ("a;rm -rf /", "a_rm_-rf"),
        ("a|b", "a_b"),
        ("Big simulation", "Big_simulation"),
        (".hidden", "hidden"),
        ("..", "run"),
        ("a/b", "a_b"),
        ('say "hi"', "say_hi"),
        ("$HOME", "HOME"),
        ("ünï", "n"),
        ("", "run"),
        ("x" * 101, "x" * 100),
    ],
)
def test_name_unfit_for_a_file_is_refused_with_the_nearest(
    quickstart: Composed, name: str, safe: str
) -> None:
    rule = "names files and jobs, so it holds only letters, digits, . _ - (at most 100)"
    shown = shortened(name) or '""'
    assert faults(quickstart, "name", name) == [f"name={shown}: {rule}. Set name={safe}. [ours.yaml:3]"]


@pytest.mark.parametrize(
    ("every", "message"),
    [
        (30, "must be a multiple of train.checkpoint_interval = 20: others are not saved. Set "
         "train.keep_every=40 or 0."),
        (9000, "keeps none of a run of train.num_steps = 100 steps. Set train.keep_every=0."),
    ],
)  # fmt: skip
def test_checkpoints_that_would_not_be_made_are_not_kept_for_good(every: int, message: str) -> None:
    words = ("train.num_steps=100", "train.checkpoint_interval=20", f"train.keep_every={every}")
    composed = compose("quickstart", words)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'train.keep_every={every}: {message}')}"):
        load(composed.values, composed.sources)


@pytest.mark.parametrize("mount", ["/scratch/$USER:/data", "/data:/data/$USER:ro", "$WORK:/data"])
def test_a_variable_in_a_mount_is_refused(quickstart: Composed, mount: str) -> None:
    site = {**quickstart.values["site"], "container_image": "x.sqsh", "container_mounts": ["/a:/b", mount]}
    rule = "no variable is replaced in this path. Write what it stands for."
    assert f"site.container_mounts[1]={mount}: {rule}" in "".join(faults(quickstart, "site", site))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("run.root", "/scratch/a$b/cost$"),
        ("site.scratch", "/scratch/$USER"),
        ("site.node_env", {"CACHE": "/scratch/$USER"}),
    ],
)
def test_a_dollar_that_is_no_variable_or_is_replaced_on_the_node_is_kept(
    quickstart: Composed, path: str, value: Any
) -> None:
    assert load(with_value(quickstart, path, value), quickstart.sources)


@pytest.mark.parametrize("name", ["no", "1f1b", "llama3_8b.v2", "a-b"])
def test_name_fit_for_a_file_is_kept(quickstart: Composed, name: str) -> None:
    sources = {**quickstart.sources, "name": Source(where="ours.yaml:3", text=name)}
    assert load(with_value(quickstart, "name", name), sources).name == name


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("run.dir", "a\nb", "run.dir='a\\nb': holds a control character. Write 'ab'."),
        ("data.source", "x\r", "data.source='x\\r': holds a control character. Write 'x'."),
        ("run.root", "a\0b", "run.root='a\\x00b': holds a control character. Write 'ab'."),
        ("executor.extra", ["a\tb"], "executor.extra[0]='a\\tb': holds a control character. Write 'ab'."),
        ("run.root", "/scratch/$USER/runs", "run.root=/scratch/$USER/runs: no variable is replaced in this "
         "path. Write what it stands for. [ours.yaml:3]"),
        ("run.root", "$HOME/runs", "no variable is replaced in this path. Set run.root=~/runs."),
        ("run.root", "$USER-runs", "no variable is replaced in this path. Write what it stands for."),
        ("run.root", "runs/x$HOME", "no variable is replaced in this path. Write what it stands for."),
        ("run.root", "$HOME/$USER", "no variable is replaced in this path. Write what it stands for."),
        ("site.python", "$HOME/bin/python", "site.python=$HOME/bin/python: no variable is replaced in this "
         "path. Write what it stands for."),
        ("model.target", "my.module", "model.target=my.module: must be package.module:function. "
         "Write my_package.my_module:my_function."),
        ("data.target", "os.system('x'):f", "data.target=os.system('x'):f: must be package.module:function."),
        ("model.options", {"a": 1}, "model.options={'a': 1}: has no effect without model.target. "
         "Remove model.options."),
        ("data.options", {"a": 1}, "has no effect without data.target. Remove data.options."),
        ("optim.decay_steps", 10, "optim.decay_steps=10: ends the decay before it begins, after the 10 steps "
         "of optim.warmup_steps. Set optim.decay_steps=11 or null."),
        ("device.peak_flops", {"bf61": 1e12}, "device.peak_flops.bf61=1000000000000.0: bf61 is not one of "
         "fp32, tf32, bf16, fp16. Did you mean bf16?"),
        ("batch.global_size", "16", "batch.global_size=16: must be a whole number of at least 1 or null. "
         "Remove the quotes."),
    ],
)  # fmt: skip
def test_rule_inside_a_group_is_held(quickstart: Composed, path: str, value: Any, message: str) -> None:
    (fault,) = faults(quickstart, path, value)
    assert message in fault


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.num_steps=5", "report.warmup_steps=5"], "report.warmup_steps=5: leaves none of the 5 steps "
         "of train.num_steps to measure. Set report.warmup_steps=2, or a larger train.num_steps. [override"),
        (["train.num_steps=1", "report.warmup_steps=1"], "leaves nothing of the one step of train.num_steps "
         "to measure. Set report.warmup_steps=0,"),
        (["data.eval_fraction=0"], "train.eval_batches=4: nothing is left to evaluate on while "
         "data.eval_fraction is 0. Set train.eval_batches=0, or data.eval_fraction=0.05. [recipes/quick"),
        (["run.dir=None"], "run.dir=None: must be text or null, and None is a text only in quotes. "
         "Write null for no value. [override run.dir=None]"),
        (["data.source=none"], "data.source=none: must be text or null, and none is a text only in"),
        (["run.dir=\"\""], 'run.dir="": must be text or null, and this one is empty. Write null'),
        (["run.root=None"], "run.root=None: must be text that is neither empty nor None. "
         "Leave it out for its default."),
        (["run.root=\"\""], 'run.root="": must be text that is neither empty nor None.'),
        (["name=None"], "name=None: None is a text only in quotes. Write null for no value. [override"),
        (["+data.options.limit=None", "data.target=a:b"], "limit=None: None is a text only in quotes."),
        (["~run.dir"], "this setting is required. Give run.dir=TEXT, or null for no value. "
         "[override ~run.dir]"),
        (["run.timeout_s=1e300"], "run.timeout_s=1e300: must be a finite number from 1 to 1000000. "
         "Write 1000000."),
        (["run.timeout_s=1e-9"], "run.timeout_s=1e-9: must be a finite number from 1 to 1000000. Write 1."),
        (["seed=18446744073709551615"], "A whole number has at most 19 digits."),
        (["+site.env.HF_TOKEN=abc123"], "Set it where you submit, and give its name: 'site.secrets=[HF"),
        (["cluster.nodes=00"], "Write 1."),
        (["report.baseline=None"], "report.baseline=None: None is a text only in quotes. "
         "Write none for no value."),
        (["parallel.recompute=partial"], "a list of none or selective or full. [override"),
    ],
)  # fmt: skip
def test_a_typed_setting_is_refused_with_what_to_write(words: list[str], message: str) -> None:
    composed = compose_sound("quickstart", words)
    with pytest.raises(ConfigError) as caught:
        load(composed.values, composed.sources)
    assert message in str(caught.value)
    assert str(caught.value).count("\n") == 0, "one mistake, one fault"


@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (2, 1), (5, 2), (6, 5), (150, 5)])
def test_the_default_warmup_leaves_a_short_run_steps_to_measure(num_steps: int, warmup_steps: int) -> None:
    composed = compose_sound("quickstart", [f"train.num_steps={num_steps}"])
    assert load(composed.values, composed.sources).report.warmup_steps == warmup_steps
    where = composed.sources["report.warmup_steps"].where
    assert where.startswith("half of train.num_steps" if warmup_steps < 5 else "conf/base.yaml:")


@pytest.mark.parametrize("word", ["+site.env.LEVEL=None", "data.name=None", "name='None'"])
def test_none_stays_a_text_where_null_has_no_place(word: str) -> None:
    composed = compose_sound("quickstart", [word])
    assert load(composed.values, composed.sources)


def test_faults_of_every_kind_come_at_once() -> None:
    words = ["parallel.tp=1,2", "model=lama3_8b", "run.dir=${nope}", "parallel.pp=0", "+env.HF_TOKEN=abc123"]
    words += ["train.num_steps=5", "report.warmup_steps=5", "name=a/b", "batch.micro_size=None"]
    composed = compose("quickstart", words)
    with pytest.raises(ConfigError) as caught:
        load(composed.values, composed.sources, composed.faults)
    paths = [fault.path for fault in caught.value.faults]
    assert paths[:3] == ["parallel.tp", "model", "run.dir"]
    assert sorted(paths[3:]) == [
        "batch.micro_size", "env", "env.HF_TOKEN", "name", "parallel.pp", "report.warmup_steps"
    ]  # fmt: skip
    assert "abc123" not in str(caught.value)


def test_a_group_with_a_fault_is_judged_no_further() -> None:
    composed = compose("quickstart", ["train.num_steps=x", "report.warmup_steps=1000"])
    with pytest.raises(ConfigError, match=r"^train\.num_steps=x: must be a whole number of at least 1\."):
        load(composed.values, composed.sources, composed.faults)


@pytest.mark.parametrize("text", ["", "seed: 3\n", "batch: {global_size: 8, seq_length: 64}\n"])
def test_a_recipe_that_extends_nothing_is_one_fault(tmp_path: Path, text: str) -> None:
    (tmp_path / "ours.yaml").write_text(text)
    composed = compose_sound(str(tmp_path / "ours.yaml"))
    with pytest.raises(
        ConfigError,
        match=r"defaults=\(missing\): no file sets .*model, data, .*\. "
        r"Begin the recipe with `defaults: \[/base, _self_\]`\.$",
    ):
        load(composed.values, composed.sources)


def test_a_file_chosen_where_settings_stand_is_told_where_to_choose_it(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("defaults: [/quickstart, _self_]\nmodel: llama3_8b\n")
    composed = compose_sound(str(tmp_path / "ours.yaml"))
    with pytest.raises(
        ConfigError,
        match=r"model=llama3_8b: must be a group of settings\. To choose a file of the group, "
        r"write `override /model: llama3_8b` into `defaults`\. \[.*ours\.yaml:2\]$",
    ):
        load(composed.values, composed.sources)


@pytest.mark.parametrize("text", ["1e-5", "1.0e-05", "0.00001"])
def test_learning_rate_is_a_float_however_it_is_written(quickstart: Composed, text: str) -> None:
    sources = {**quickstart.sources, "optim.lr": Source(where="", text=text)}
    assert load(with_value(quickstart, "optim.lr", 0.00001), sources).optim.lr == 0.00001


# The saved form


def test_saved_configuration_means_the_same_to_pyyaml(quickstart: Composed) -> None:
    config = load(with_value(quickstart, "optim.lr", 1e-5), {})
    assert "lr: 1.0e-05" in dump(config)
    assert yaml.safe_load(dump(config)) == plain(config)


def test_saved_configuration_is_a_recipe_of_the_same_configuration(
    own_folder: Any, quickstart: Composed
) -> None:
    values = with_value(
        quickstart, "executor", {"name": "torchrun", "time": "12:30:00", "on": "no", "n": "010"}
    )
    values["run"]["dir"] = 'a "b": ü #c'
    values["data"]["source"] = "1e5"
    config = load(values, {})
    path = own_folder / "resolved.yaml"
    path.write_text(dump(config), encoding="utf-8")
    again = compose_sound(str(path))
    assert load(again.values, again.sources) == config
    assert yaml.safe_load(dump(config)) == plain(config)


@pytest.mark.parametrize(
    "value",
    [1e-05, 1e16, 3.0, 0.1, 312e12, -1e-300, 7, None, True, "no", "on", "1e-5", "010", "1:30", "~", "",
     "null", "a: b", "# x", "=", "<<", "2023-09-16", "é", "a'b", 'a"b', "back\\slash", "y", "-", "[x]",
     "tab\t", "0x1f", "1_0"],
)  # fmt: skip
def test_scalar_text_reads_back_as_itself(value: Any) -> None:
    read_back = yaml.safe_load(f"key: {scalar_text(value)}\nlist: {scalar_text([value, {'a': value}])}\n")
    assert read_back == {"key": value, "list": [value, {"a": value}]}
    assert type(read_back["key"]) is type(value)


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("model.num_layers", 10_000),
        ("model.hidden_size", 10_000_000),
        ("model.num_heads", 10_000_000),
        ("model.num_kv_heads", 10_000_000),
        ("model.ffn_size", 10_000_000),
        ("model.vocab_size", 10_000_000),
        ("cluster.nodes", 10_000_000),
        ("cluster.devices_per_node", 10_000),
    ],
)
def test_a_size_that_would_keep_the_plan_busy_is_refused(quickstart: Composed, path: str, limit: int) -> None:
    (fault,) = faults(quickstart, path, limit + 1)
    assert fault.startswith(f"{path}={limit + 1}: must be a whole number from 1 to {limit}")
    assert fault.endswith(f"Write {limit}. [ours.yaml:3]")
    assert load(with_value(quickstart, path, limit), quickstart.sources)
