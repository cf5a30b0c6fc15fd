"""What a refusal advises works when it is followed, and the tests would see it if it did not.

Every refusal of a plan in any test is followed (`tests.helpers.advice`); here is advice that once did not
work, and advice that is made not to.
"""

from __future__ import annotations

import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.app.planning import make_plan
from launcher.app.request import Request
from launcher.app.sweep.planning import plan_sweep
from launcher.base.errors import AsTyped, ConfigError, Fault, PlanError, as_override, offer
from launcher.cli.main import main
from launcher.config.overrides import refused_fault
from tests.helpers import advice

SERVERS = "architecture=parameter_server parallel.dp=2 parallel.pp=1"
MINUTE = (
    "model.hidden_size=2 model.num_heads=1 model.num_layers=1 model.ffn_size=2 model.vocab_size=256 "
    "batch.seq_length=4 cluster.allow_idle_devices=true"
)
FOLLOWED = {
    "strategy@parallel=pp": "no group",
    "precision@precision=fp32": "Give precision=fp32.",
    "parallel.zero_stage=2,3": "Give one value, or use trireme sweep.",
    "pp=4": "Did you mean parallel.pp?",
    "optim.betas=0.9,0.99": "A list is written 'optim.betas=[0.9,0.99]'.",
    "parallel.dp=-1": "Write auto.",
    "executor=slrum": "Did you mean slurm?",
    "hydra.run.dir=x": "Leave it out; run.dir names the directory of a run",
    "hydra/launcher=submitit": "Hydra merges the files here and starts nothing",
    "+parallel.plugins.zero={}": "Remove parallel.plugins.zero.",
    "precision=tf32": "Set precision=fp32.",
    "precision=fp16 precision.master_weights=false": "vanish in fp16. Set precision.master_weights=true",
    f"{SERVERS} precision=fp16": "Set precision.compute=bf16",
    f"{SERVERS} device.memory_bytes=5000000": "each server would hold 20.2 MB, and has 5.00 MB. No change",
    f"{SERVERS} architecture.servers=10000 cluster.devices_per_node=10000 cluster.nodes=2 {MINUTE}": (
        "the model has 568 parameters to train, and each server holds some of them. Set architecture.ser"
    ),
    "data.source=$HOME/x.txt": "no variable is replaced in this path. Set data.source=~/x.txt.",
    "run.root=$SCRATCH/x": "no variable is replaced in this path. Write what it stands for.",
    "run.root=$USER-runs": "no variable is replaced in this path. Write what it stands for.",
    "run.root=$HOME-runs": "no variable is replaced in this path. Write what it stands for.",
    "run.root=$HOME/$USER": "no variable is replaced in this path. Write what it stands for.",
    r"run.root=runs/\${HOME}x": "nothing expands its ${...}. Write what it stands for.",
    "parallel.tp=3 parallel.pp=3 batch.global_size=7": "All at once: ",
    "parallel.schedule=interleaved_1f1b parallel.pp=3 batch.global_size=10 parallel.tp=3": "All at once: ",
}
"""Overrides of the quickstart, and what is said of them."""


@pytest.mark.parametrize(("words", "told"), FOLLOWED.items(), ids=FOLLOWED)
def test_advice_on_what_is_often_mistyped_works_when_it_is_followed(words, told):
    with pytest.raises(ConfigError) as refused:  # followed as it is raised
        make_plan("quickstart", words.split())
    assert told in str(refused.value)


def test_a_refusal_of_hydra_that_is_not_known_is_passed_on():
    assert "at line 3" in str(refused_fault("a.b=1", "unheard of at line 3\nand more", ()))


@pytest.mark.parametrize("value", ["2,3", "[2,3]", "two"])
def test_a_list_is_offered_only_where_one_is_taken(value):
    with pytest.raises(ConfigError) as refused:
        make_plan("quickstart", [f"parallel.zero_stage={value}"])
    assert "[" not in str(refused.value).partition(":")[2].partition(" [override")[0]


@pytest.mark.parametrize("value", [[1, 2], {"rope_type": "llama3", "factor": 8.0}, "*.txt", "~/a b", "~/a"])
def test_a_shell_takes_what_is_advised_as_one_word_and_as_it_is(value, tmp_path):
    (tmp_path / "a.b=1").touch()  # what an open [1,2] would match
    told = offer([{"a.b": 0}, {"a.b": value}]).removeprefix("Set a.b=0 or ").removesuffix(".")
    word = told if told[0] == "'" else f"a.b={told}"
    expanded = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {word}"], cwd=tmp_path, text=True)
    assert [expanded.rstrip("\n")] == shlex.split(as_override("a.b", value))


def test_a_path_below_the_home_folder_is_taken_as_it_is_typed():
    assert make_plan("quickstart", ["data.source=~/my text.txt"]).plan.config.data.source == "~/my text.txt"


def test_a_dotted_key_of_a_file_is_nested_with_its_quotes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'defaults: [/quickstart, _self_]\ndata.name: "1,2: {4}"\n'
    Path("ours.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        make_plan("./ours.yaml", ())
    nested = str(refused.value).partition("Nest it: ")[2].rpartition(". [")[0]
    Path("ours.yaml").write_text(text.replace('data.name: "1,2: {4}"', nested))
    assert make_plan("./ours.yaml", ()).plan.config.data.name == "1,2: {4}"


@pytest.mark.parametrize(
    "command",
    [
        "quickstart parallel.pp=1",
        "parallel.pp=1",
        "plan --config-name quickstart",
        "submit executor=slrum --dry-run",
    ],
)
def test_the_command_that_is_told_is_one(command, capsys):
    assert main(shlex.split(command)) == 2
    told = capsys.readouterr().err
    if ": trireme " in told:  # Did you mean: trireme run quickstart?
        words = shlex.split(told.partition(": trireme ")[2].rstrip("?\n"))
        assert main(["plan", *words[1:]]) == 0
        assert words[0] == "run"
    elif "without the flag" in told:
        assert main(["plan", told.rpartition(": ")[2].rstrip(".\n")]) == 0
    else:
        assert "Did you mean slurm?" in told


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_told_however_it_is_asked_for(word, capsys):
    assert main([word]) == 0
    assert capsys.readouterr().out.startswith("trireme ")


# What would be seen


def followed(faults: Sequence[Fault], left: Sequence[Fault], **together) -> None:
    """Follows faults of which others are left after whatever was advised."""

    def plan(recipe: str, words: Sequence[str]) -> None:
        if left:
            raise PlanError(left)

    advice.check(PlanError(faults, **together), plan, "quickstart", ["a.b=1"], Counter())


ADVISED = Fault("a.b", 1, "must be even", ways=({"a.b": 2},))
OTHER = Fault("c.d", 1, "must be even", ways=({"c.d": 2},))


def test_advice_that_leaves_its_fault_is_seen():
    followed([ADVISED], [])
    with pytest.raises(AssertionError, match=r"the fault is not gone: (?s:.*)followed: a\.b=2"):
        followed([ADVISED], [ADVISED])


def test_advice_that_is_refused_in_its_turn_is_seen():
    elsewhere = Fault("a.b", 1, "must be even", ways=({"c.d": 3},))
    with pytest.raises(AssertionError, match="what was advised is refused"):
        followed([elsewhere], [Fault("c.d", 3, "must be below 3")])


def test_advice_that_does_not_go_together_is_seen():
    with pytest.raises(AssertionError, match="does not go together"):
        followed([ADVISED, OTHER], [Fault("e.f", 1, "must be a.b + c.d")])
    with pytest.raises(AssertionError, match="does not go together"):
        followed([ADVISED, OTHER], [Fault("e.f", 1, "must be a.b")], together={"a.b": 4})


def test_advice_of_an_executor_that_it_refuses_itself_is_seen(make_plan):
    stubborn = Fault("executor.max_restarts", 0, "is refused", ways=({"executor.max_restarts": 2},))
    checked = advice.following_check(lambda executor, plan, run_dir: [stubborn])
    with pytest.raises(AssertionError, match=r"refused: \{'executor.max_restarts'\}"):
        checked(None, make_plan())


def test_advice_of_a_plan_that_is_built_without_a_recipe_is_followed(make_plan):
    def stubborn(config):
        raise PlanError([Fault("train.num_steps", 0, "is refused", ways=({"train.num_steps": 2},))])

    with pytest.raises(AssertionError, match=r"refused: \{'train.num_steps'\}"):
        advice._following_build(stubborn)(make_plan().config)


def test_advice_on_the_points_of_a_sweep_is_followed(monkeypatch):
    followed = []
    monkeypatch.setattr(advice, "check", lambda error, plan, recipe, words, done: followed.append(words))
    plan_sweep(Request(recipe="quickstart", overrides=("parallel.tp=1,3",)))
    assert ("parallel.tp=3",) in followed
    followed.clear()
    with pytest.raises(ConfigError):
        plan_sweep(Request(recipe="quickstart", overrides=("seed=1,1",)))
    assert followed == [("seed=1,1",)]


def test_what_is_advised_takes_the_place_of_what_was_typed():
    words = ["+a.b=1", "~c", "d=1,2"]
    way = {"a.b": 2, "c": "(left out)", "d": AsTyped("[1,2]"), "e": "(left out)"}
    assert advice.followed(words, way) == ("a.b=2", "d=[1,2]", "~e")


def test_a_place_that_no_test_reaches_is_named(tmp_path, monkeypatch):
    notes = tmp_path / "places"
    monkeypatch.setenv(advice.NOTES, str(notes))
    every = sorted(set(advice.places()))
    assert advice.unreached_places() == every
    notes.write_text("\n".join(every[1:]))
    assert advice.unreached_places() == every[:1]
