"""A new run that begins with a checkpoint of another: what is refused, written down and shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.app import lifecycle
from launcher.app.lookup import beginning
from launcher.app.planning import make_plan
from launcher.base.errors import ConfigError, LauncherError
from launcher.base.files import read_json
from launcher.cli.main import main
from launcher.contract.inputs.lineage import stored_lineage
from launcher.contract.job import JobState
from launcher.contract.model.checkpoint import checkpoint_faults, complete_steps, source_checkpoint
from launcher.report.notes import run_notes
from launcher.report.runs import load_run
from launcher.runs.store import RunDirectory
from tests.helpers.fake_runs import FakeRun

AT_40 = "train.init_from=r/checkpoints/step-00000040"
SAVED = ("train.num_steps=60", "train.checkpoint_interval=20", "--no-baseline")


def with_checkpoint(run: Path, step: int) -> Path:
    """A complete checkpoint, as far as its marker tells."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "complete.json").write_text(json.dumps({"step": step, "sha256": f"digest of {step}"}))
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in_corpus: None) -> Path:
    """The folder of runs, in which ``source`` has two checkpoints and a third that is being written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lifecycle, "follow", lambda *_: JobState(phase="succeeded", exit_code=0))
    assert main(["run", "quickstart", "run.dir=runs/source", *SAVED]) == 0
    for step in (20, 40):
        with_checkpoint(tmp_path / "runs" / "source", step)
    (tmp_path / "runs" / "source" / "checkpoints" / "step-00000060.unfinished").mkdir()
    return tmp_path / "runs"


Refused = Callable[..., list[str]]


@pytest.fixture
def refused(runs: Path) -> Refused:
    """The faults of a plan that begins with the source's checkpoint after step 40."""

    def faults(*words: str, step: int = 40) -> list[str]:
        folder = runs / "source" / "checkpoints" / f"step-{step:08d}"
        plan = make_plan("quickstart", [f"train.init_from={folder}", *words]).plan
        return [str(fault) for fault in checkpoint_faults(plan.config, plan.num_parameters)]

    return faults


# Which checkpoint


def test_the_newest_complete_checkpoint_is_taken_else_the_one_that_is_named(runs: Path) -> None:
    source = runs / "source"
    assert complete_steps(source) == [20, 40]
    assert beginning("source") == f'train.init_from="{source}/checkpoints/step-00000040"'
    assert beginning("source@20") == f'train.init_from="{source}/checkpoints/step-00000020"'
    odd = source.rename(runs / "o'dd @x, 1")
    assert main(["plan", "quickstart", "--from", str(odd)]) == 0
    assert beginning(f"{odd}@20") == f'train.init_from="{odd}/checkpoints/step-00000020"'


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("source@30", r"^--from source@30: the run has no complete checkpoint after step 30\. Those that it "
         r"has are after step 20, 40\.$"),
        ("source@60", r"no complete checkpoint after step 60\. "),
        ("sorce", r"^no run directory at sorce\. Did you mean source\?$"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(
    runs: Path, word: str, message: str
) -> None:
    with pytest.raises(LauncherError, match=message):
        beginning(word)


def test_a_run_without_a_checkpoint_is_refused(runs: Path) -> None:
    shutil.rmtree(runs / "source" / "checkpoints")
    with pytest.raises(LauncherError, match=r"^--from source: the run has no complete checkpoint\.$"):
        beginning("source")


def test_two_beginnings_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "quickstart", "--from", "source", "train.init_from=x"]) == 2
    told = "--from and train.init_from both say what the training begins with: give one of them.\n"
    assert capsys.readouterr().err == told
    assert main(["run", "quickstart", "--from", "source", "--resume"]) == 2
    assert capsys.readouterr().err == (
        "--resume goes on with a run, which knows what it began with, and --from begins a new one: give one "
        "of them.\n"
    )


# Which models


@pytest.mark.parametrize(
    "words", [(), ("model.dropout=0.5",), ("parallel.pp=4",), ("seed=3",), ("optim.lr=1",)], ids=str
)
def test_another_training_of_the_same_model_begins_there(refused: Refused, words: tuple[str, ...]) -> None:
    assert refused(*words) == []


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("model.num_layers=8", "train.init_from holds a model with 4. Set model.num_layers=4."),
        ("model.ffn_size=64", "train.init_from holds a model with 512. Set model.ffn_size=512."),
        ("model.vocab_size=512", "train.init_from holds a model with 256. Set model.vocab_size=256."),
        ("model.tied_embeddings=false", "train.init_from holds a model with True. Set "
         "model.tied_embeddings=true."),
    ],
)  # fmt: skip
def test_other_shapes_are_refused_before_anything_starts(refused: Refused, word: str, told: str) -> None:
    assert refused(word) == [f"{word}: {told}"]
    assert main(["run", "quickstart", "--from", "source", word]) == 2


def test_a_model_of_llama_with_other_biases_or_norms_is_refused(runs: Path, refused: Refused) -> None:
    plan = read_json(runs / "source" / "plan.json")
    plan["config"]["model"] |= {"family": "llama", "attention_bias": "qkv", "qk_norm": True}
    (runs / "source" / "plan.json").write_text(json.dumps(plan))
    assert refused("model.family=llama", "model.norm_eps=1e-5", "model.sliding_window=8") == [
        "model.attention_bias=none: train.init_from holds a model with qkv. Set model.attention_bias=qkv.",
        "model.qk_norm=false: train.init_from holds a model with True. Set model.qk_norm=true.",
    ]


def test_what_no_shape_tells_is_noted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = read_json(runs / "source" / "plan.json")
    plan["config"]["model"] |= {"family": "llama", "sliding_window": 8}
    (runs / "source" / "plan.json").write_text(json.dumps(plan))
    words = ["plan", "quickstart", "--from", "source", "model.family=llama", "model.norm_eps=1e-6"]
    assert main([*words, "model.rope_theta=5e5"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    for setting, was, is_now in (
        *(("norm_eps", "1e-05", "1e-06"), ("rope_theta", "10000.0", "500000.0")),
        ("sliding_window", "8", "null"),
    ):
        assert f"The weights were trained with model.{setting}={was}, and go on with {is_now}." in told
    assert "rope_scaling" not in told


def test_the_state_of_another_optimizer_is_not_taken_over(refused: Refused) -> None:
    words = ("optim=lion", "train.num_steps=80")
    told = "optim.name=lion: train.init_optimizer takes over the state of adamw, which train.init_from was "
    assert refused(*words, "train.init_optimizer=true") == [
        f"{told}trained with. Set train.init_optimizer=false."
    ]
    assert refused(*words) == []


@pytest.mark.parametrize(
    ("before", "words", "missing"),
    [
        (
            {"groups": {"up": {"names": ["layers.1.*"], "frozen": True}}},
            [],
            "exp_avg of layers.1.attention.q.weight",
        ),
        ({"name": "sgd", "momentum": 0}, ["optim=sgd"], "momentum_buffer of embedding.weight"),
        (
            {"name": "muon"},
            ["optim=muon", "optim.adamw_names=['layers.2.*']"],
            "exp_avg of layers.2.attention.q.weight",
        ),
    ],
    ids=["frozen", "without a sum", "another part's"],
)
def test_a_state_that_was_not_kept_is_told_before_anything_starts(
    runs: Path, refused: Refused, before: dict[str, Any], words: list[str], missing: str
) -> None:
    plan = read_json(runs / "source" / "plan.json")
    optim = plan["config"]["optim"]
    if "name" in before:
        optim = {name: value for name, value in optim.items() if name not in ("betas", "eps")}
    plan["config"]["optim"] = optim | before
    (runs / "source" / "plan.json").write_text(json.dumps(plan))
    words = [*words, "train.num_steps=80"]
    assert refused(*words, "train.init_optimizer=true") == [
        f"train.init_optimizer=true: train.init_from has no {missing}, as its run had other settings in "
        "optim. Set train.init_optimizer=false, or take the settings of that run."
    ]
    assert refused(*words) == []


def test_a_state_that_was_not_kept_is_not_needed_of_what_is_frozen(runs: Path, refused: Refused) -> None:
    plan = read_json(runs / "source" / "plan.json")
    plan["config"]["optim"]["groups"] = {"up": {"names": ["layers.1.*"], "frozen": True}}
    (runs / "source" / "plan.json").write_text(json.dumps(plan))
    words = ("optim.groups.all.names=['layers.*']", "optim.groups.all.frozen=true", "train.num_steps=80")
    assert refused(*words, "train.init_optimizer=true") == []


def test_a_longer_table_of_positions_is_refused_with_the_rows_that_it_has(refused: Refused) -> None:
    (fault,) = refused("batch.seq_length=32")
    assert fault.startswith("model.max_position_embeddings=null: train.init_from holds a model with ")


def test_another_family_is_refused(refused: Refused) -> None:
    (fault,) = refused("model.family=llama", "model.norm_eps=1e-5")
    assert fault == "model.family=llama: train.init_from holds a model with gpt. Set model.family=gpt."


def test_layers_of_ones_own_are_those_of_the_source(runs: Path, refused: Refused, tmp_path: Path) -> None:
    plan = read_json(runs / "source" / "plan.json")
    plan["config"]["model"] |= {"family": "custom", "target": "mine:build"}
    (runs / "source" / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom types import SimpleNamespace\n"
        "def loss(output, targets):\n    return output.sum() * 0\n"
        "def build():\n    return SimpleNamespace(layers=[torch.nn.Embedding(256, 8)], loss=loss)\n"
        "def other():\n    return build()\n"
    )
    sizes = [f"model.{name}=null" for name in ("num_layers", "hidden_size", "num_heads")]
    words = ["model=custom", *sizes, "parallel.pp=1"]
    number = plan["num_parameters"]
    assert refused(*words, "model.target=mine:build") == [
        f"model.target=mine:build: builds 2048 parameters, and train.init_from holds a model with {number}. "
        "Build the model that was trained there."
    ]
    assert refused(*words, "model.target=mine:other") == [
        "model.target=mine:other: train.init_from holds a model with mine:build. Set model.target=mine:build."
    ]


def test_a_checkpoint_that_is_not_complete_is_refused_with_those_that_are(refused: Refused) -> None:
    (fault,) = refused(step=60)
    assert fault.endswith("is no complete checkpoint. Those that its run has are after step 20, 40.")


def test_a_run_without_any_is_refused(runs: Path, refused: Refused) -> None:
    shutil.rmtree(runs / "source" / "checkpoints")
    (fault,) = refused()
    assert fault.endswith("is no complete checkpoint. Its run has none.")


@pytest.mark.parametrize("text", ["", "{}", '{"config": 3}', '{"config": {"model": {}, "batch": {}}}'])
def test_a_checkpoint_whose_model_is_not_known_is_refused(runs: Path, refused: Refused, text: str) -> None:
    (runs / "source" / "plan.json").write_text(text)
    (fault,) = refused()
    assert (
        "is of a run whose plan.json is missing or damaged, so that its model is not known. Give a checkpoint"
        in fault
    )


def test_a_plan_for_this_machine_is_refused_where_the_source_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "quickstart", f"train.init_from={tmp_path}/runs/a/checkpoints/step-00000040"]) == 2
    assert "step-00000040: is no complete checkpoint. Its run has none. [override" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (("plan",), ("cluster.nodes=2",)),
        (("plan",), ("executor=slurm",)),
        (("submit", "--dry-run"), ("site=box", "cluster.devices_per_node=2")),
        (("sweep", "plan"), ("executor=slurm", "optim.lr=1e-3,2e-3")),
    ],
    ids=str,
)
def test_a_plan_for_other_machines_is_made_where_the_source_is_not_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...], words: tuple[str, ...]
) -> None:
    source = tmp_path / "runs" / "a" / "checkpoints" / "step-00000040"
    assert main([*verb, "quickstart", f"train.init_from={source}", *words]) == 0
    told = f"note: {source}, which it begins with, is not on this machine: nothing of it is checked.\n"
    assert capsys.readouterr().err.count(told) == 1
    source.mkdir(parents=True)
    assert main([*verb, "quickstart", f"train.init_from={source}", *words]) == 2


# What is taken


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("train.init_from=folder",), "train.init_optimizer=true: takes the state of an optimizer, and "
         "train.init_from is no checkpoint of a run, which has one. Set train.init_optimizer=false."),
        ((AT_40, "train.num_steps=40"), "train.num_steps=40: counts the 40 steps of the checkpoint that "
         "train.init_optimizer goes on from. Set train.num_steps to more than 40, or "
         "train.init_optimizer=false."),
        ((AT_40, "train.num_steps=50", "report.warmup_steps=10"), "report.warmup_steps=10: leaves none of "
         "the 10 steps after the checkpoint that train.init_from names up to train.num_steps to measure. Set "
         "report.warmup_steps=5, or a larger train.num_steps."),
    ],
)  # fmt: skip
def test_an_optimizer_goes_on_where_there_is_one_and_steps_are_left(
    words: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        make_plan("quickstart", [*words, "train.init_optimizer=true"])
    assert [str(fault).partition(" [")[0] for fault in raised.value.faults] == [told]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "the weights of {} after step 40: its optimizer is fresh, and it begins with step 1 of its data "
         "and learning rates."),
        (("train.init_optimizer=true",), "the weights and the optimizer of {} after step 40: it goes on with "
         "step 41 of 90 of its own data and learning rates."),
    ],
)  # fmt: skip
def test_a_plan_says_what_the_run_begins_with(runs: Path, words: tuple[str, ...], told: str) -> None:
    plan = make_plan("quickstart", [beginning("source"), *words, "train.num_steps=90"]).plan
    assert plan.notes[0] == f"It begins with {told.format(runs / 'source')}"


# What is written down


def test_the_lineage_is_written_down_and_outlives_the_source(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begins = ["run", "quickstart", "--no-baseline", "train.checkpoint_interval=20"]
    assert main([*begins, "--from", "source@20", "run.dir=runs/child", "train.num_steps=60"]) == 0
    with_checkpoint(runs / "child", 40)
    grown = ("--from", "child", "run.dir=runs/grandchild", "train.num_steps=90", "train.init_optimizer=true")
    assert main([*begins, *grown]) == 0
    child, grandchild = (stored_lineage(runs / name) for name in ("child", "grandchild"))
    (parent,) = child
    fingerprint = read_json(runs / "source" / "job.json")["fingerprint"]
    assert (parent.run, parent.step, parent.takes_optimizer) == (str(runs / "source"), 20, False)
    assert (parent.checkpoint_sha256, parent.fingerprint) == ("digest of 20", fingerprint)
    assert [(each.run, each.step, each.takes_optimizer) for each in grandchild] == [
        (str(runs / "child"), 40, True),
        (str(runs / "source"), 20, False),
    ]
    shutil.rmtree(runs / "child")
    shutil.rmtree(runs / "source")
    with_checkpoint(runs / "grandchild", 60)
    RunDirectory(runs / "grandchild").write_status("cancelled")
    capsys.readouterr()
    resumed = [word for word in grown[2:] if not word.startswith("train.init_optimizer")]
    assert main([*begins, *resumed, "--resume"]) == 0, capsys.readouterr().err
    assert stored_lineage(runs / "grandchild") == grandchild
    train = read_json(runs / "grandchild" / "plan.json")["config"]["train"]
    assert train["init_from"] == f"{runs}/child/checkpoints/step-00000040"
    assert train["init_optimizer"] is True


def test_a_resume_with_another_beginning_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "quickstart", *SAVED, "run.dir=runs/child"]
    assert main([*words, "--from", "source@20"]) == 0
    with_checkpoint(runs / "child", 40)
    RunDirectory(runs / "child").write_status("cancelled")
    own = f"train.init_from={runs}/source/checkpoints/step-000000"
    capsys.readouterr()
    assert main([*words, f"{own}40", "--resume"]) == 2
    assert "settings that change what is trained differ: train.init_from (" in capsys.readouterr().err
    assert main([*words, f"{own}20", "train.init_optimizer=true", "--resume"]) == 2
    assert "differ: train.init_optimizer (false -> true)" in capsys.readouterr().err
    assert main([*words, f"{own}20", "--resume"]) == 0


def test_a_plan_of_a_chain_shows_its_ancestry(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "quickstart", "--from", "source@20", "run.dir=runs/child", *SAVED]) == 0
    with_checkpoint(runs / "child", 40)
    capsys.readouterr()
    assert main(["plan", "quickstart", "--from", "child"]) == 0
    told = f"note: It began with the weights of {runs}/child after step 40, which began with the weights of "
    assert capsys.readouterr().err == f"{told}{runs}/source after step 20.\n"


def test_a_report_names_what_a_run_began_with(tmp_path: Path) -> None:
    run = FakeRun().write(tmp_path / "fake")
    ancestor = {"run": "/r/a", "step": 4, "takes_optimizer": True}
    entry = ancestor | {"checkpoint_sha256": "", "fingerprint": ""}
    (run / "job.json").write_text(json.dumps({"lineage": [entry, 3, {"run": 1}]}))
    told = "fake began with the weights and the optimizer of /r/a after step 4."
    assert told in list(run_notes(load_run(run)))


def test_a_folder_of_another_name_is_no_checkpoint() -> None:
    train = make_plan("quickstart", ["train.init_from=a/checkpoints/step-00000040/"]).plan.config.train
    source = source_checkpoint(train)
    assert source is not None
    assert (source.run_dir, source.step) == (Path("a"), 40)
    other = make_plan("quickstart", ["train.init_from=a/checkpoints/step-x"]).plan.config.train
    assert source_checkpoint(other) is None
