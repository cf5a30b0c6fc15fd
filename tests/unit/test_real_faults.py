"""Faults that users of other launchers met, typed at this one: the right value, or a refusal that helps."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from launcher.app.planning import make_plan as make_plan_of
from launcher.base.errors import ConfigError
from launcher.cli.main import main
from launcher.config.save import dump
from launcher.runs.render import render, shell_text

EXTENDS_QUICKSTART = "defaults: [/quickstart, _self_]\n"
INTERLEAVED = ("parallel.schedule=interleaved_1f1b", "parallel.num_chunks=2")
LLAMA = "llama3_8b_tp4_dp2_8xh100"


class Answer(NamedTuple):
    """What the command line did."""

    code: int
    out: str
    err: str


Trireme = Callable[..., Answer]
Write = Callable[[str], str]


@pytest.fixture
def trireme(capsys: pytest.CaptureFixture[str]) -> Trireme:
    """Runs the command line in this process."""

    def run(*words: str) -> Answer:
        capsys.readouterr()
        code = main(words)
        return Answer(code, *capsys.readouterr())

    return run


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a recipe that extends the quickstart; gives its path as it is typed."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("ours.yaml").write_text(EXTENDS_QUICKSTART + text)
        return "./ours.yaml"

    return write


def planned(answer: Answer) -> dict[str, Any]:
    assert answer.code == 0, answer.err
    plan: dict[str, Any] = json.loads(answer.out)
    return plan


# One spelling, one meaning


def test_a_learning_rate_in_scientific_notation_is_one_float_everywhere(trireme, recipe, make_plan):
    typed = trireme("recipe", "show", "optim.lr=1e-5").out
    written = trireme("recipe", "show", recipe("optim: {lr: 1e-5}\n")).out
    assert "  lr: 1.0e-05 " in typed
    assert "  lr: 1.0e-05 " in written
    saved = yaml.safe_load(dump(make_plan("optim.lr=1e-5").config))
    assert saved["optim"]["lr"] == 1e-5


MISREAD = {
    "a_time_is_no_base_60_number": ("run.timeout_s", "12:30:00"),
    "a_pair_of_ports_is_no_number": ("seed", "22:22"),
    "a_leading_zero_is_no_octal_number": ("cluster.nodes", "010"),
    "a_padded_number_is_no_text": ("cluster.devices_per_node", "08"),
    "a_float_is_no_whole_number": ("parallel.tp", "4.0"),
    "a_bool_is_no_number": ("parallel.pp", "true"),
    "a_count_is_not_zero": ("parallel.num_chunks", "0"),
    "a_count_is_not_negative": ("train.num_steps", "-1"),
    "a_rate_is_a_number": ("optim.lr", "nan"),
    "a_rate_is_finite": ("optim.eps", "inf"),
    "dp_is_not_the_word_none": ("parallel.dp", "None"),
    "on_is_no_bool": ("parallel.sequence_parallel", "on"),
    "two_is_no_bool": ("cluster.allow_idle_devices", "2"),
}
"""Settings with a text that some reader of YAML takes for another value."""


@pytest.fixture(scope="module")
def misread(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Everything misread at once, typed and written: both refusals."""
    path = tmp_path_factory.mktemp("recipes") / "ours.yaml"
    groups: dict[str, list[str]] = {}
    for setting, text in MISREAD.values():
        group, _, name = setting.rpartition(".")
        groups.setdefault(group, []).append(f"{name}: {text}")
    lines = [f"{group}: {{{', '.join(items)}}}" for group, items in groups.items() if group]
    path.write_text("\n".join([EXTENDS_QUICKSTART.rstrip(), *groups[""], *lines]) + "\n")
    return refusal(str(path)), refusal("quickstart", *map("=".join, MISREAD.values()))


def refusal(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan_of(recipe, overrides)
    return str(caught.value)


@pytest.mark.parametrize(("path", "text"), MISREAD.values(), ids=MISREAD)
def test_a_misread_scalar_is_refused_alike_in_yaml_and_on_the_command_line(misread, path, text):
    pattern = re.compile(rf" {re.escape(f'{path}={text}')}: (must be .*) \[(.*)\]")
    (written, line), (typed, override) = (pattern.findall(refused)[0] for refused in misread)
    assert written == typed
    assert re.search(r"ours\.yaml:\d+$", line)
    assert override == f"override {path}={text}"


def test_a_list_keeps_its_leading_zeros_until_they_are_refused(trireme):
    refused = trireme("plan", "parallel.layers_per_stage=[01,03]")
    assert "parallel.layers_per_stage[1]=03" in refused.err
    assert "Write 3, without leading zeros." in refused.err


def test_a_name_that_yaml_takes_for_a_bool_stays_text(trireme, recipe):
    assert planned(trireme("plan", recipe("name: no\n"), "--json"))["config"]["name"] == "no"
    assert planned(trireme("plan", "name=no", "--json"))["config"]["name"] == "no"


def test_a_key_that_yaml_takes_for_a_bool_is_named_as_written(trireme, recipe):
    assert trireme("plan", recipe("parallel: {on: 1}\n")).err.startswith("parallel.on=1: not a setting here.")


def test_the_published_name_of_a_schedule_is_its_name(trireme):
    schedule = planned(trireme("plan", "parallel.schedule=1f1b", "--json"))["config"]["parallel"]["schedule"]
    assert schedule == "1f1b"


# What is typed, and how


@pytest.mark.parametrize(
    ("word", "message"),
    [
        pytest.param(
            "run.dir=epoch=9.ckpt", "paste 'run.dir=\"epoch=9.ckpt\"'.", id="an_equals_sign_in_a_value"
        ),
        pytest.param("run.dir=a#b", "paste 'run.dir=\"a#b\"'.", id="a_hash_in_a_value"),
        pytest.param("data.source=n[01-03]", "paste 'data.source=\"n[01-03]\"'.", id="a_list_of_nodes"),
        pytest.param(
            "data.source=n1,n2",
            "One text is written 'data.source=\"n1,n2\"'.",
            id="a_comma_in_a_text",
        ),
        pytest.param(
            "optim.betas=0.9,0.99",
            "A list is written 'optim.betas=[0.9,0.99]'.",
            id="a_comma_without_brackets",
        ),
        pytest.param("++run.dir=['a\\','b']", "cannot be parsed as an override", id="a_trailing_backslash"),
        pytest.param("\\parallel.tp=4", "as when a line continuation is pasted", id="a_pasted_backslash"),
        pytest.param("parallel.tp:=4", "stray colon before the =. Give parallel.tp=4.", id="a_stray_colon"),
        pytest.param("--parallel.tp=4", "written without dashes: parallel.tp=4.", id="a_setting_as_a_flag"),
        pytest.param("paralell.tp=4", "Did you mean parallel?", id="a_misspelt_group"),
        pytest.param("~parallel.tp", "this setting is required.", id="a_deleted_setting"),
        pytest.param("name=../x", "Set name=x.", id="a_name_that_climbs"),
        pytest.param("name='a;rm -rf /'", "Set name=a_rm_-rf.", id="a_name_that_is_a_command"),
        pytest.param("name=a|b", "Set name=a_b.", id="a_name_that_is_a_pipe"),
        pytest.param("optim.lr=${oc.env:HOME}", "Give the name of the variable", id="a_secret_by_value"),
        pytest.param("executor=slrum", "Did you mean slurm?", id="an_executor_that_is_not_installed"),
    ],
)
def test_a_word_that_means_something_else_is_refused_with_what_to_type(trireme, word, message):
    answer = trireme("plan", word)
    assert answer.code == 2
    assert message in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("data.source=a.b@example.org", '  source: "a.b@example.org" '),
        ("data.source=/d/shard-??.bin", '  source: "/d/shard-??.bin" '),
        ("parallel.tp=4\r", "  tp: 4 "),
        ('run.dir="a#b=c"', '  dir: "a#b=c" '),
    ],
    ids=["at_sign", "question_marks", "carriage_return", "quoted"],
)
def test_a_word_that_other_tools_choke_on_is_taken_as_it_is(trireme, word, shown):
    assert shown in trireme("recipe", "show", word).out


def test_a_key_written_twice_is_refused_with_both_lines(trireme, recipe):
    error = trireme("plan", recipe("optim:\n  lr: 1\n  lr: 2\n")).err
    assert (
        error == "optim.lr=(twice): is set twice in one group, first in line 3. Remove one. [ours.yaml:4]\n"
    )


def test_a_recipe_of_ones_own_is_planned_with_shipped_ones_in_view(trireme, recipe):
    assert planned(trireme("plan", recipe("parallel: {tp: 4}\n"), "--json"))["mesh"]["tp"] == 4
    assert trireme("plan", "quickstart").code == 0


# Parallel products and batch arithmetic


def test_every_degree_set_to_one_plans_one_rank(trireme):
    words = [f"parallel.{axis}=1" for axis in ("dp", "tp", "pp", "num_chunks")]
    plan = planned(trireme("plan", *words, "cluster.devices_per_node=1", "--json"))
    assert [role["num_ranks"] for role in plan["roles"]] == [1]
    assert plan["traffic"] == []


def test_dp_follows_from_the_devices(trireme):
    words = (LLAMA, "parallel.dp=auto", "parallel.tp=4", "parallel.pp=1", "--json")
    assert planned(trireme("plan", *words))["mesh"]["dp"] == 2


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        pytest.param(
            ["parallel.dp=8", "parallel.tp=2"],
            ["world = dp * tp * pp = 8 * 2 * 2 = 32 ranks", "tp from override parallel.tp=2", "1 * 8 = 8"],
            id="a_product_larger_than_the_devices",
        ),
        pytest.param(
            [LLAMA, "parallel.dp=1"],
            [
                "4 would stay idle",
                "Set parallel.dp=2, or parallel.pp=2, or parallel.tp=8, or cluster.allow_idle_devices=true.",
            ],
            id="a_product_smaller_than_the_devices",
        ),
        pytest.param(
            [LLAMA, "parallel.tp=16", "parallel.dp=1", "cluster.nodes=2"],
            ["parallel.tp=16: must divide model.num_kv_heads = 8; 8/16 is not whole. Set parallel.tp=8 "],
            id="more_tensor_ranks_than_key_heads",
        ),
        pytest.param(
            ["model.num_heads=32", "model.num_kv_heads=5"],
            ["must divide num_heads = 32 (1, 2, 4, 8, 16, 32). Set model.num_kv_heads=4 or 8."],
            id="key_heads_that_do_not_divide_the_heads",
        ),
        pytest.param(["model.num_kv_heads=0"], ["a whole number from 1 to 10000000"], id="no_key_heads"),
        pytest.param(
            ["model.num_layers=30", "parallel.pp=4"],
            ["pp must divide 30 (", "Set parallel.pp=5 or 3, or parallel.layers_per_stage=auto."],
            id="layers_that_would_be_dropped",
        ),
        pytest.param(
            ["model.num_layers=80", "parallel.pp=8", *INTERLEAVED, "parallel.num_chunks=3"],
            ["so pp * 3 = 24 must divide 80", "parallel.layers_per_stage=auto"],
            id="chunks_that_would_drop_layers",
        ),
        pytest.param(
            ["model.num_layers=20", "parallel.pp=1", "parallel.layers_per_stage=[1]"],
            ["the stages hold 1 layer, the model has 20. Set parallel.layers_per_stage=even"],
            id="a_split_of_one_layer_of_twenty",
        ),
        pytest.param(
            ["model.num_layers=8", "parallel.pp=3", "parallel.layers_per_stage=[4,0,4]"],
            ["stage 1 would hold no layer. Set parallel.layers_per_stage=auto"],
            id="an_empty_stage",
        ),
        pytest.param(
            ["model.num_layers=8", "parallel.pp=4", *INTERLEAVED, "batch.micro_size=8"],
            ["micro_size=8: num_microbatches", "= 16 / (8 * 1) = 2; 4 ranks need at least 4 microbatches"],
            id="interleaving_with_too_few_microbatches",
        ),
        pytest.param(
            ["model.num_layers=8", "parallel.pp=4", *INTERLEAVED, "batch.global_size=20"],
            ["runs microbatches in groups of pp=4, so they must be a multiple of 4"],
            id="interleaving_with_microbatches_left_over",
        ),
        pytest.param(
            ["batch.micro_size=2", "batch.global_size=256", "parallel.dp=7", "parallel.pp=1"],
            ["256/14 is not whole", "Set batch.global_size=252 or 266"],
            id="a_batch_that_does_not_divide",
        ),
        pytest.param(
            ["batch.global_size=8", "batch.num_microbatches=3", "batch.micro_size=null"],
            ["8/3 is not whole. Set batch.global_size=6 or 9"],
            id="microbatches_of_unequal_size",
        ),
        pytest.param(
            ["batch.num_microbatches=4"],
            ["must be micro_size * num_microbatches * dp = 2 * 4 * 1 = 8"],
            id="three_sizes_that_disagree",
        ),
        pytest.param(
            ["parallel.zero_stage=2", "parallel.dp=2", "parallel.pp=2"],
            ["a pipeline of 2 stages", "Set parallel.zero_stage=1, or parallel.pp=1."],
            id="zero_2_with_a_pipeline",
        ),
    ],
)
def test_a_strategy_that_cannot_run_is_refused_with_its_arithmetic(trireme, words, messages):
    answer = trireme("plan", *words)
    assert answer.code == 2
    assert [message for message in messages if message not in answer.err] == []


def test_an_uneven_split_trains_every_layer(trireme):
    words = ["model.num_layers=30", "parallel.pp=4", "parallel.layers_per_stage=[8,8,7,7]"]
    stages = planned(trireme("plan", *words, "--json"))["stages"]
    assert [stage["num_layers"] for stage in stages] == [8, 8, 7, 7]
    assert stages[-1]["first_layer"] + stages[-1]["num_layers"] == 30


def test_1f1b_with_fewer_microbatches_than_ranks_warns_of_its_bubble(trireme):
    answer = trireme("plan", "parallel.pp=4", "batch.global_size=8", "batch.micro_size=4")
    assert "2 microbatches cannot fill 4 pipeline ranks" in answer.out
    assert "bubble 60.0% by formula" in answer.out


def test_a_vocabulary_that_tp_does_not_divide_is_padded_and_said(trireme):
    answer = trireme("plan", "model.vocab_size=250682", "parallel.tp=4")
    assert "The vocabulary of 250682 is padded to 250684, a multiple of tp = 4" in answer.out


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_tied_embeddings_on_two_stages_sum_their_gradients(trireme, num_stages):
    words = [f"parallel.pp={num_stages}", "model.num_layers=12", "--json"]
    rows = planned(trireme("plan", *words))["traffic"]
    tied = [row["pp_rank"] for row in rows if row["purpose"] == "tied embedding gradients"]
    assert tied == [0, num_stages - 1]


# Jobs and secrets


def test_the_ranks_are_given_one_plan_and_no_override(make_plan):
    script = render(make_plan("seed=7"), Path("/runs/a"))
    assert [word for word in script.argv if "=" in word and "seed" in word] == []
    assert "/runs/a/plan.json" in script.argv


def test_runs_on_one_machine_share_no_port(make_plan):
    words = render(make_plan(), Path("/runs/a")).argv
    assert not [word for word in words if "port" in word or "endpoint" in word]


@pytest.mark.parametrize("name", ["a 0", 'a"=0"', "a'; echo foo", "a\\=0"])
def test_a_hostile_run_directory_stays_one_word_of_the_script(make_plan, name):
    script = render(make_plan(), Path("/runs", name))
    one_line = shell_text(script).replace(" \\\n", " ")
    assert shlex.split(one_line, comments=True)[-len(script.argv) :] == list(script.argv)
    assert f"/runs/{name}/plan.json" in script.argv


def test_a_plan_needs_no_command_of_the_machine(trireme, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert trireme("plan").code == 0
