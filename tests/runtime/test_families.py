"""Models of transformers in Trireme's split layers: their logits, their training, and back again."""

from __future__ import annotations

import json
import pydoc_data.topics
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from launcher.contract.model.folder import INDEX
from launcher.contract.model.tensors import file_tensors
from launcher.contract.plan import Plan
from launcher.runtime.checkpoint.export import export, joined
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer, _load_initial
from tests.helpers.equality import CPU, NUM_STEPS, Sabotage, job, skip_sums_over, train
from tests.helpers.halves import save
from tests.helpers.logits import tokens_and_logits_of_a_step
from tests.helpers.pretrained_folders import FILES, QWEN_2_5, model_of_folder
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.their_models import (
    Batches,
    saved_by_them,
    their_logits,
    trained_by_them,
)
from tests.helpers.tokenizers import write_hugging_face

LAYOUTS: dict[str, dict[str, Any]] = {"alone": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
Computed = dict[tuple[str, str], tuple[Tensor, Tensor]]
VARIANTS: dict[str, dict[str, Any]] = {
    **FILES,
    "llama with biases": FILES["llama"] | {"attention_bias": True},
    "mistral without a window": FILES["mistral"] | {"sliding_window": None, "head_dim": 8},
    "qwen2 with a window, untied": FILES["qwen2"]
    | {
        **{"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        **{"tie_word_embeddings": False, "head_dim": 8},
    },
    "qwen3 with biases and a window": FILES["qwen3"]
    | {
        **{"use_sliding_window": True, "sliding_window": 3, "attention_bias": True},
        **{"layer_types": ["sliding_attention", "sliding_attention"]},
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of every family, its weights in several files."""
    root = tmp_path_factory.mktemp("theirs")
    made = {name: saved_by_them(root / name, VARIANTS[name], max_shard_size="10KB") for name in VARIANTS}
    assert all((folder / INDEX).is_file() for folder in made.values())
    return made


def begun_from(folder: Path, *, data: dict[str, Any] | None = None, **parallel: Any) -> Plan:
    model = model_of_folder(folder)
    return job(model=model, data=data or {}, parallel=parallel, train={"init_from": str(folder)})


@pytest.fixture(scope="module")
def computed(folders: dict[str, Path]) -> Computed:
    """Tokens and logits of every family under every layout, before the training."""
    found: Computed = {}
    for layout, parallel in LAYOUTS.items():
        plans = [begun_from(folder, **parallel) for folder in folders.values()]
        results = tokens_and_logits_of_a_step(plans)
        found |= {(name, layout): result for name, result in zip(folders, results, strict=True)}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_logits_are_those_of_transformers(
    name: str, layout: str, computed: Computed, folders: dict[str, Path]
) -> None:
    tokens, logits = computed[name, layout]
    torch.testing.assert_close(logits, their_logits(folders[name], tokens), rtol=1e-4, atol=1e-4)


def batches_of(rank: int, plan: Plan) -> list[Batches]:
    steps = Loader(make_context(plan.rank(rank), CPU)).steps(0)
    return [[(batch.inputs, batch.targets) for batch in next(steps)] for _ in range(NUM_STEPS)]


def begin(trainer: Trainer, loader: Loader) -> None:
    _load_initial(trainer)


def assert_trained_alike(folder: Path, found: Plan, loop: Plan, beginning: Sabotage = begin) -> None:
    """``loop``: the plan whose batches and optimizer are given to transformers' own loop."""
    (steps,) = run_ranks(1, batches_of, loop)
    losses, weights = trained_by_them(folder, steps, loop.config)
    ours = train(found, beginning)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(losses), rtol=2e-5, atol=0)

    def read(name: str, offset: Any, shape: Any) -> Tensor:
        return ours.weights[name.partition("/")[2]]

    for tensor in file_tensors(found.config.model, found.batch.seq_length):
        theirs = weights[tensor.name]
        torch.testing.assert_close(
            joined(tensor, read), theirs, rtol=0, atol=1e-4, msg=f"{tensor.name}: {{}}".format
        )


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("family", FILES)
def test_training_steps_are_those_of_transformers_own_loop(
    family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved_by_them(tmp_path / "theirs", FILES[family], std=0.2)
    assert_trained_alike(folder, begun_from(folder, **layout), begun_from(folder))


@pytest.mark.parametrize("layout", [{"dp": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_a_qwen_trained_on_words_of_a_text_has_the_losses_of_transformers_own_loop(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    text = Path(pydoc_data.topics.__file__).read_text()
    words = write_hugging_face(tmp_path / "tokenizer.json", 2000, text.splitlines())
    deep = QWEN_2_5 | {"num_hidden_layers": 4, "vocab_size": 2000}
    folder = saved_by_them(tmp_path / "theirs", deep, std=0.2)
    data = {"tokenizer": str(words), "cache_dir": str(tmp_path)}
    alone = begun_from(folder, data=data)
    ((first, *_),) = run_ranks(1, batches_of, alone)
    ids = torch.cat([inputs for inputs, _ in first])
    read = Tokenizer.from_file(str(words)).decode(ids[0].tolist())
    assert read.strip() in text
    assert ids.max() > 1000
    assert_trained_alike(folder, begun_from(folder, data=data, **layout), alone)


def train_and_save(rank: int, plan: Plan, root: Path) -> None:
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    _load_initial(trainer)
    for step in range(2):
        trainer.step(step, next(steps))
    save(trainer, root, 2)


@pytest.mark.parametrize("original", [True, False], ids=["with the first config", "without"])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_exported_is_the_same_model_to_transformers_and_to_us(
    name: str, original: bool, computed: Computed, folders: dict[str, Path], tmp_path: Path
) -> None:
    run, plan = tmp_path / "run", begun_from(folders[name], pp=2)
    run.mkdir()
    (run / "plan.json").write_text(plan.to_json())
    if original:
        (run / "init_config.json").write_text(json.dumps(VARIANTS[name]))
    run_ranks(2, train_and_save, plan, run / "checkpoints")
    export(run, tmp_path / "ours")
    kind = VARIANTS[name]["model_type"]
    if name == "mistral without a window" and not original:
        kind = "llama"  # the first that has a place for it
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == kind
    assert model_of_folder(tmp_path / "ours") == model_of_folder(folders[name]) | {"name": "ours"}
    ((tokens, logits),) = tokens_and_logits_of_a_step([begun_from(tmp_path / "ours")])
    torch.testing.assert_close(their_logits(tmp_path / "ours", tokens), logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(computed[name, "alone"][1], logits, rtol=0, atol=1e-3), "nothing was trained"


# What follows changes one thing each; the comparisons above must see it.


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"layer_norm_epsilon": 0.1}),
        ("llama", {"rope_scaling": None}),
        ("mistral", {"sliding_window": 2}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"rope_theta": 100.0}),
        ("qwen2 with a window, untied", {"max_window_layers": 1}),
        ("qwen3", {"rms_norm_eps": 0.1}),
    ],
    ids=str,
)
def test_the_logits_of_another_config_are_told_apart(
    name: str, changes: dict[str, Any], computed: Computed, folders: dict[str, Path], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(folders[name], tmp_path / "other"))
    (other / "config.json").write_text(json.dumps(VARIANTS[name] | changes))
    tokens, logits = computed[name, "alone"]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(logits, their_logits(other, tokens), rtol=1e-4, atol=1e-4)


def begin_without_the_norms_of_heads(trainer: Trainer, loader: Loader) -> None:
    """Their gradients are those of each rank's own heads."""
    begin(trainer, loader)
    skip_sums_over("tp")(trainer, loader)


@pytest.mark.parametrize(
    ("sabotage", "lr"),
    [(begin, 2e-2), (begin_without_the_norms_of_heads, 1e-2)],
    ids=["lr", "norms of heads"],
)
def test_another_training_is_told_apart(sabotage: Sabotage, lr: float, tmp_path: Path) -> None:
    folder = saved_by_them(tmp_path / "theirs", FILES["qwen3"], std=0.2)
    plan = begun_from(folder, tp=2)
    found = replace(plan, config=replace(plan.config, optim=replace(plan.config.optim, lr=lr)))
    with pytest.raises(AssertionError) as caught:
        assert_trained_alike(folder, found, begun_from(folder), sabotage)
    assert not isinstance(caught.value, RankError)
