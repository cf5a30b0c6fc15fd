"""Models in Hugging Face's format, in every form that their files have: the logits of transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from launcher.config.paths import changed
from launcher.contract.model.folder import INDEX, WEIGHTS, initial_weights_faults
from launcher.contract.model.formats import FIXED, FORMATS, FREE
from launcher.contract.model.rope import RopeScaling
from launcher.contract.model.sizes import Sizes
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.plan.checked_job import PlanInputs
from launcher.runtime.checkpoint.export import export
from launcher.runtime.model.blocks import Rotary
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import train
from tests.helpers.configs import launch_config
from tests.helpers.equality import CPU, job
from tests.helpers.logits import logits_of_all
from tests.helpers.pretrained_folders import FILES, LLAMA_3_1
from tests.helpers.ranks import run_ranks
from tests.helpers.run_folders import make_folders
from tests.helpers.their_models import saved_by_them, their_logits

ROPE = LLAMA_3_1["rope_scaling"]
UNTYPED = {name: value for name, value in ROPE.items() if name != "rope_type"}
SCALING = RopeScaling(**ROPE)
LLAMA = {"family": "llama", "num_layers": 2, "num_kv_heads": 2, "ffn_size": 24, "tied_embeddings": False}
QWEN = LLAMA | {"rope_theta": 1e6, "norm_eps": 1e-6, "tied_embeddings": True}
RECIPES: dict[str, dict[str, Any]] = {
    "gpt2": {"num_layers": 2, "max_position_embeddings": 32},
    "llama": LLAMA | {"rope_theta": 500000.0, "rope_scaling": SCALING},
    "mistral": LLAMA | {"sliding_window": 3, "rope_theta": 1e4},
    "qwen2": QWEN | {"attention_bias": "qkv"},
    "qwen3": QWEN | {"qk_norm": True, "head_dim": 8},
}


def plan_for(folder: Path, family: str, **changes: Any) -> Plan:
    return job(model=RECIPES[family] | changes, train={"init_from": str(folder)})


FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "as GPT-2's own": ("gpt2", {}, {}, {}),
    "as Llama 3.1's own": ("llama", {}, {}, {}),
    "in several files": ("llama", {}, {}, {"max_shard_size": "10KB"}),
    "with the first name of the scaling's type": (
        "llama",
        {"rope_scaling": {"type": "llama3", **UNTYPED}},
        {},
        {},
    ),
    "as transformers 5 writes it": (
        "llama",
        {"rope_scaling": None, "rope_parameters": {**ROPE, "rope_theta": 500000.0}},
        {},
        {},
    ),
    "without scaling": ("llama", {"rope_scaling": None}, {"rope_scaling": None}, {}),
    "with wider heads": ("llama", {"head_dim": 8}, {"head_dim": 8}, {}),
    "with another MLP": ("gpt2", {"n_inner": 48}, {"ffn_size": 48}, {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_format_gives_the_logits_of_transformers_and_goes_back_into_it(
    form: str, tmp_path: Path
) -> None:
    """And an export after a step that changes no weight has the original's entries and its logits."""
    family, entries, settings, saved = FORMS[form]
    original = FILES[family] | entries
    folder = saved_by_them(tmp_path / "theirs", original, **saved)
    assert (folder / (INDEX if saved else WEIGHTS)).is_file()
    plan = plan_for(folder, family, **settings)
    (((tokens, logits),),) = run_ranks(1, logits_of_all, [plan])
    expected = their_logits(folder, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    exported = exported_again(plan, tmp_path)
    assert torch.equal(their_logits(exported, tokens), expected)
    written = json.loads((exported / "config.json").read_text())
    changed_entries = {"torch_dtype", "rope_parameters", "rope_scaling", "embd_pdrop", "resid_pdrop"}
    kept = original.keys() - changed_entries
    assert {name: written[name] for name in kept} == {name: original[name] for name in kept}
    assert written["torch_dtype"] == written["dtype"] == "float32"


def exported_again(plan: Plan, tmp_path: Path) -> Path:
    """The export of a run that begins with a folder and does not move from it."""
    config = changed(
        plan.config,
        {"train.num_steps": 1, "train.checkpoint_interval": 1, "optim.lr": 1e-30, "report.warmup_steps": 0},
    )
    run, still = tmp_path / "run", build(config, inputs=PlanInputs())
    make_folders(run)
    (run / "plan.json").write_text(still.to_json())
    run_ranks(1, whole_training, still, run)
    export(run, tmp_path / "ours")
    return tmp_path / "ours"


def whole_training(rank: int, plan: Plan, run: Path) -> None:
    train(make_context(plan.rank(rank), CPU), run, resume=False)


MUTATIONS: list[tuple[str, str, Any, str]] = [
    ("llama", "rms_norm_eps", 0.1, "other"),
    ("llama", "rope_theta", 100.0, "other"),
    ("llama", "rope_scaling", None, "other"),
    ("llama", "rope_scaling", ROPE | {"factor": 2}, "other"),
    ("llama", "rope_scaling", {"type": "llama3", **UNTYPED, "low_freq_factor": 2.0}, "other"),
    ("llama", "rope_scaling", ROPE | {"original_max_position_embeddings": 128}, "other"),
    ("llama", "rope_scaling", {"type": "default"}, "other"),
    ("llama", "rope_parameters", ROPE, "same"),
    ("llama", "rope_parameters", {"rope_type": "default"}, "refused"),
    ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}, "refused"),
    ("llama", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "refused"),
    ("llama", "rope_scaling", {"factor": 2.0}, "refused"),
    ("llama", "partial_rotary_factor", 0.5, "refused"),
    ("llama", "head_dim", 4, "same"),
    ("llama", "head_dim", 8, "refused"),
    ("llama", "num_attention_heads", 2, "refused"),
    ("llama", "num_key_value_heads", 4, "refused"),
    ("llama", "num_key_value_heads", None, "refused"),
    ("llama", "num_hidden_layers", 1, "refused"),
    ("llama", "num_hidden_layers", 3, "refused"),
    ("llama", "hidden_size", 32, "refused"),
    ("llama", "intermediate_size", 48, "refused"),
    ("llama", "vocab_size", 257, "refused"),
    ("llama", "tie_word_embeddings", True, "refused"),
    ("llama", "hidden_act", "gelu", "refused"),
    ("llama", "attention_bias", True, "refused"),
    ("llama", "mlp_bias", True, "refused"),
    ("llama", "model_type", "mistral", "refused"),
    ("llama", "max_position_embeddings", 64, "same"),
    ("llama", "attention_dropout", 0.5, "same"),
    ("llama", "initializer_range", 0.5, "same"),
    ("llama", "pretraining_tp", 2, "same"),
    ("llama", "use_cache", False, "same"),
    ("llama", "bos_token_id", 1, "same"),
    ("llama", "torch_dtype", "float16", "same"),
    ("llama", "architectures", ["LlamaModel"], "same"),
    ("llama", "id2label", {"0": "a"}, "same"),
    ("llama", "chunk_size_feed_forward", 1, "same"),
    ("llama", "is_decoder", True, "same"),
    ("mistral", "sliding_window", 2, "other"),
    ("mistral", "sliding_window", None, "other"),
    ("mistral", "sliding_window", 8, "other"),
    ("mistral", "rms_norm_eps", 0.1, "other"),
    ("mistral", "attention_bias", False, "refused"),
    ("qwen2", "use_sliding_window", True, "same"),
    ("qwen2", "layer_types", ["full_attention"] * 2, "same"),
    ("qwen2", "layer_types", ["sliding_attention"] * 2, "refused"),
    ("qwen2", "rope_theta", 100.0, "other"),
    ("qwen2", "tie_word_embeddings", False, "refused"),
    ("qwen2", "rope_scaling", {"type": "yarn", "factor": 4.0}, "refused"),
    ("qwen3", "rms_norm_eps", 0.1, "other"),
    ("qwen3", "attention_bias", True, "refused"),
    ("qwen3", "head_dim", 4, "refused"),
    ("qwen3", "rope_theta", 100.0, "other"),
    ("llama", "no_such_entry", 1, "refused"),
    ("llama", "no_such_entry", None, "same"),
    ("gpt2", "layer_norm_epsilon", 0.1, "other"),
    ("gpt2", "n_head", 2, "other"),
    ("gpt2", "n_positions", 64, "refused"),
    ("gpt2", "n_layer", 1, "refused"),
    ("gpt2", "n_inner", 64, "same"),
    ("gpt2", "n_inner", 48, "refused"),
    ("gpt2", "tie_word_embeddings", True, "same"),
    ("gpt2", "tie_word_embeddings", False, "refused"),
    ("gpt2", "activation_function", "gelu_pytorch_tanh", "same"),
    ("gpt2", "activation_function", "gelu", "refused"),
    ("gpt2", "activation_function", "relu", "refused"),
    ("gpt2", "scale_attn_weights", False, "refused"),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, "refused"),
    ("gpt2", "add_cross_attention", True, "refused"),
    ("gpt2", "num_hidden_layers", 1, "refused"),
    ("gpt2", "reorder_and_upcast_attn", True, "same"),
    ("gpt2", "attn_pdrop", 0.9, "same"),
    ("gpt2", "n_ctx", 8, "same"),
    ("gpt2", "summary_type", "mean", "same"),
    ("gpt2", "bos_token_id", None, "same"),
]
"""An entry with another value. ``same``: no logit depends on it; ``other``: logits are those of a recipe with
the setting that the fault names; ``refused``: no such recipe can begin with these weights."""


def test_one_changed_entry_changes_the_model_as_in_transformers_or_is_refused(tmp_path: Path) -> None:
    folders = {family: saved_by_them(tmp_path / family, FILES[family]) for family in FILES}
    cases: list[tuple[Path, str, str, str]] = []
    plans = [plan_for(folder, family) for family, folder in folders.items()]
    for number, (family, entry, value, outcome) in enumerate(MUTATIONS):
        folder = shutil.copytree(folders[family], tmp_path / str(number))
        (folder / "config.json").write_text(json.dumps(FILES[family] | {entry: value}))
        plan = followed(plan_for(folder, family))
        what = f"{entry} = {value}"
        assert (plan is None) == (outcome == "refused"), what
        if plan is not None:
            plans.append(plan)
            cases.append((folder, family, outcome, what))
    (results,) = run_ranks(1, logits_of_all, plans)
    before = {family: logits for family, (_, logits) in zip(folders, results, strict=False)}
    for (folder, family, outcome, what), (tokens, logits) in zip(cases, results[len(folders) :], strict=True):
        torch.testing.assert_close(
            logits, their_logits(folder, tokens), rtol=1e-4, atol=1e-4, msg=f"{what}: {{}}".format
        )
        assert torch.equal(logits, before[family]) == (outcome == "same"), what


def followed(plan: Plan) -> Plan | None:
    """The plan, or that with every setting that its faults name; None where that is refused, too."""
    config = plan.config
    for _ in range(2):  # the planned key heads are those of the first number of heads
        for way in (way for fault in initial_weights_faults(config) for way in fault.ways):
            ((path, value),) = way.items()
            config = changed(config, {path: RopeScaling(**value) if isinstance(value, dict) else value})
    return None if initial_weights_faults(config) else build(config, inputs=PlanInputs())


@pytest.mark.parametrize("family", FILES)
def test_every_entry_that_transformers_has_is_decided_on(family: str) -> None:
    """A newer release may have more of them."""
    decided = {*FORMATS[family].told, *FORMATS[family].fixed, *FIXED, *FREE}
    theirs = {item.name for item in dataclasses.fields(CONFIG_MAPPING[family])}
    assert theirs - decided == set()


def test_rotary_positions_of_llama_3_1_are_those_of_transformers() -> None:
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    sizes = {"family": "llama", "hidden_size": 4096, "num_heads": 32}
    model = launch_config(model=sizes | {"rope_theta": 5e5, "rope_scaling": scaling}).model
    rope = {**dataclasses.asdict(scaling), "rope_theta": 5e5}
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, rope_parameters=rope)
    positions = torch.arange(512)
    cosine, sine = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = Rotary(model, Sizes.of(model, 512), CPU)
    torch.testing.assert_close(ours.cosine, cosine[0, :, :64], rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.sine, sine[0, :, :64], rtol=0, atol=1e-4)
    plain = Rotary(dataclasses.replace(model, rope_scaling=None), Sizes.of(model, 512), CPU)
    assert float((plain.sine - ours.sine).abs().max()) > 0.1
