"""A trained model, used by the transformers library: the same logits and the same loss; and back again."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.base.errors import ConfigError, JobError, PlanError
from launcher.contract.model.folder import WEIGHTS
from launcher.contract.model.formats import CONFIG
from launcher.contract.model.rope import RopeScaling
from launcher.contract.plan import Plan
from launcher.runtime.checkpoint.export import export, main
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.model.pretrained import Pretrained
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer, _load_initial
from tests.helpers.equality import CPU, job
from tests.helpers.halves import save
from tests.helpers.logits import tokens_and_logits
from tests.helpers.ranks import RankError, run_ranks

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt", "num_layers": 2, "max_position_embeddings": 12},
    "gpt2 untied, odd vocabulary": {"num_layers": 2, "tied_embeddings": False, "vocab_size": 257},
    "llama": {"family": "llama", "num_layers": 2, "num_kv_heads": 2, "tied_embeddings": False},
    "llama tied, other base": {"family": "llama", "num_layers": 2, "rope_theta": 500.0, "ffn_size": 24},
    "llama with wide heads and scaled positions": {
        "family": "llama",
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rope_scaling": RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8
        ),
    },
}


def a_model(name: str, **parallel: Any) -> Plan:
    return job(model=MODELS[name], parallel=parallel)


def train_and_save(rank: int, plan: Plan, root: Path) -> None:
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    for step in range(2):
        trainer.step(step, next(steps))
    save(trainer, root, 2)


def trained_run(plan: Plan, run: Path) -> Path:
    run.mkdir()
    (run / "plan.json").write_text(plan.to_json())
    run_ranks(plan.world_size, train_and_save, plan, run / "checkpoints")
    return run


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_logits_that_we_compute(name: str, tmp_path: Path) -> None:
    """Trained under tp and pp; ours from the checkpoint, theirs from what was exported of it, and ours
    again from that."""
    run = trained_run(a_model(name, tp=2, pp=2), tmp_path / "run")
    assert export(run, tmp_path / "model") == (2, 1)
    ((tokens, logits),) = run_ranks(1, tokens_and_logits, a_model(name), run / "checkpoints")
    ((_, again),) = run_ranks(1, tokens_and_logits, begun_from(tmp_path / "model", name), None)
    assert torch.equal(again, logits)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(tokens).logits
    torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-5)


def begun_from(folder: Path, name: str, **parallel: Any) -> Plan:
    return job(model=MODELS[name], parallel=parallel, train={"init_from": str(folder)})


@pytest.mark.parametrize("name", MODELS)
def test_a_model_made_by_transformers_begins_with_their_loss_under_any_layout(
    name: str, tmp_path: Path
) -> None:
    """Its config is ours, its weights are its own; the loss of the first step is that of its weights."""
    export(trained_run(a_model(name), tmp_path / "run"), tmp_path / "sizes")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "sizes"))
    model.save_pretrained(tmp_path / "theirs")
    (batches,) = run_ranks(1, first_step_batches, a_model(name))
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
            for inputs, targets in batches
        ]
    expected = float(torch.stack(losses).mean())
    for layout in ({}, {"tp": 2, "pp": 2}):
        plan = begun_from(tmp_path / "theirs", name, **layout)
        losses_of_ranks = run_ranks(plan.world_size, first_loss, plan)
        assert losses_of_ranks[-1] == pytest.approx(expected, rel=1e-5)


def first_step_batches(rank: int, plan: Plan) -> list[tuple[Tensor, Tensor]]:
    loader = Loader(make_context(plan.rank(rank), CPU))
    return [(batch.inputs, batch.targets) for batch in next(loader.steps(0))]


def first_loss(rank: int, plan: Plan) -> float | None:
    ctx = make_context(plan.rank(rank), CPU)
    trainer = Trainer(ctx)
    _load_initial(trainer)
    return trainer.step(0, next(Loader(ctx).steps(0))).loss


def test_a_large_model_is_spread_over_files(tmp_path: Path) -> None:
    run = trained_run(a_model("gpt2"), tmp_path / "run")
    _, count = export(run, tmp_path / "model", file_bytes=20_000)
    assert count > 2
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == count
    export(run, tmp_path / "whole")
    whole, parts = (AutoModelForCausalLM.from_pretrained(folder) for folder in exported_folders(tmp_path))
    for (name, one), (_, other) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    begun = [run_ranks(1, first_loss, begun_from(folder, "gpt2")) for folder in exported_folders(tmp_path)]
    assert begun[0] == begun[1]


def exported_folders(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "whole", tmp_path / "model"


def test_weights_are_exported_in_the_format_they_are_computed_with(tmp_path: Path) -> None:
    plan = job(
        model=MODELS["llama"],
        precision={"name": "bf16", "compute": "bf16", "master_weights": True},
        device={"peak_flops": {"fp32": 1e9, "bf16": 1e9}},
    )
    export(trained_run(plan, tmp_path / "run"), tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_a_run_without_a_checkpoint_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(a_model("gpt2").to_json())
    assert main([str(tmp_path), str(tmp_path / "model")]) == 1
    assert capsys.readouterr().err.startswith("no intact checkpoint in ")
    assert not (tmp_path / "model").exists()


def test_shared_keys_have_no_place_in_gpt2(tmp_path: Path) -> None:
    plan = job(model=MODELS["gpt2"] | {"num_kv_heads": 2})
    (tmp_path / "plan.json").write_text(plan.to_json())
    with pytest.raises(JobError, match=r"model\.num_kv_heads=2 of 4: its format has no place for shared"):
        export(tmp_path, tmp_path / "model")


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    export(trained_run(a_model("gpt2"), tmp_path / "run"), tmp_path / "model")
    plan = job(model=MODELS["gpt2"] | {"num_layers": 3}, train={"init_from": str(tmp_path / "model")})
    with pytest.raises(RankError, match=r"model\.num_layers=3: .* holds a model with 2 \(n_layer in its"):
        run_ranks(1, first_loss, plan)


@pytest.mark.parametrize(
    ("name", "content"), [(WEIGHTS, pickle.dumps({})), (WEIGHTS, None), (CONFIG, b"[]"), (CONFIG, None)]
)
def test_a_file_of_another_form_is_no_model(name: str, content: bytes | None, tmp_path: Path) -> None:
    plan = a_model("gpt2")
    export(trained_run(plan, tmp_path / "run"), tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content) if content else (tmp_path / "model" / name).unlink()
    with pytest.raises(ConfigError, match=rf"train\.init_from={tmp_path}/model: .*{name}"):
        Pretrained(str(tmp_path / "model"), plan.config.model, plan.batch.seq_length)


def test_everybody_may_read_the_weights_who_may_read_the_sizes(tmp_path: Path) -> None:
    export(trained_run(a_model("gpt2"), tmp_path / "run"), tmp_path / "model")
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1


def test_a_users_own_layers_cannot_begin_with_such_a_file() -> None:
    with pytest.raises(PlanError, match=r"train\.init_from=x: holds the weights of a model of Hugging"):
        job(model={"family": "custom", "target": "a:b"}, train={"init_from": "x"})
