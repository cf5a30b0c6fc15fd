"""``model.path``: the network of a folder in Hugging Face's format, read as a recipe is planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.app.planning import make_plan
from launcher.base.errors import ConfigError, JobError
from launcher.cli.main import main
from launcher.config.save import dump
from launcher.contract.config import LaunchConfig, ModelConfig
from launcher.contract.model.config_json import config_of
from launcher.contract.model.folder import initial_weights_faults
from launcher.contract.model.from_folder import settled
from launcher.contract.plan import Plan
from tests.helpers.configs import launch_config, with_settings
from tests.helpers.pretrained_folders import FILES, QWEN_2_5, QWEN_3, write_folder

SEQ = 16
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt", "max_position_embeddings": 32, "tied_embeddings": True},
    "llama": {"ffn_size": 24, "num_kv_heads": 2, "rope_theta": 5e5, "norm_eps": 1e-5},
    "mistral": {"sliding_window": 3, "attention_bias": "none", "rope_theta": 1e4, "num_kv_heads": 2},
    "qwen2": {"sliding_window": None, "attention_bias": "qkv", "qk_norm": False, "norm_eps": 1e-6},
    "qwen3": {"qk_norm": True, "attention_bias": "none", "head_dim": 8, "rope_theta": 1e6},
}
"""Some of what the files say."""


def folder_of(entries: dict[str, Any], folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(entries))
    return str(folder)


def recipe(entries: dict[str, Any], folder: Path) -> LaunchConfig:
    return launch_config(model={"path": folder_of(entries, folder)}, batch={"seq_length": SEQ})


def model_of(entries: dict[str, Any], folder: Path) -> ModelConfig:
    return settled(recipe(entries, folder).model, SEQ)


def refusals(entries: dict[str, Any], folder: Path, *given: str, **settings: Any) -> list[str]:
    config = with_settings(recipe(entries, folder), {"model": settings})
    with pytest.raises(ConfigError) as caught:
        settled(config.model, SEQ, given)
    return [str(fault) for fault in caught.value.faults]


def planned(folder: str, *words: str) -> Plan:
    return make_plan("quickstart", ("model=hf", f"model.path={folder}", "batch.seq_length=16", *words)).plan


@pytest.mark.parametrize("kind", FILES)
def test_the_plan_has_the_settled_values_and_not_the_folder(kind: str, tmp_path: Path) -> None:
    plan = planned(folder_of(FILES[kind], tmp_path / "a model"))
    model = plan.config.model
    assert NETWORKS[kind].items() <= vars(model).items()
    assert (model.name, model.path) == ("a model", None)
    assert (model.num_layers, model.hidden_size, model.num_heads, model.vocab_size) == (2, 16, 4, 256)
    assert Plan.from_json(plan.to_json()).config.model == model


def test_the_recorded_settings_compose_to_the_same_without_the_folder(tmp_path: Path) -> None:
    plan = planned(folder_of(QWEN_3, tmp_path / "qwen"))
    (tmp_path / "qwen" / "config.json").unlink()
    (tmp_path / "again.yaml").write_text(dump(plan.config))
    assert make_plan(str(tmp_path / "again.yaml"), ()).plan.config.model == plan.config.model


@pytest.mark.parametrize("kind", FILES)
def test_the_folder_is_one_to_begin_with(kind: str, tmp_path: Path) -> None:
    model = model_of(FILES[kind], tmp_path)
    config = with_settings(launch_config(model=vars(model)), {"batch": {"seq_length": SEQ}})
    config = with_settings(config, {"train": {"init_from": str(tmp_path)}})
    write_folder(tmp_path, FILES[kind], config)
    assert initial_weights_faults(config) == []


@pytest.mark.parametrize("kind", FILES)
def test_what_is_exported_is_settled_to_the_same(kind: str, tmp_path: Path) -> None:
    model = model_of(FILES[kind], tmp_path)
    for original in (None, FILES[kind]):
        written = config_of(model, SEQ, "float32", original)
        assert written["model_type"] == kind
        assert model_of(written, tmp_path) == model


SLIDING = {"use_sliding_window": True, "sliding_window": 3}


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (SLIDING | {"max_window_layers": 0}, 3),
        (SLIDING | {"max_window_layers": 2}, None),
        (SLIDING | {"layer_types": ["sliding_attention"] * 2}, 3),
        (SLIDING | {"layer_types": ["full_attention"] * 2}, None),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"sliding_window": 3, "max_window_layers": 0}, None),
    ],
    ids=str,
)
def test_the_window_of_a_qwen_file_is_that_of_all_its_layers(
    changes: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    assert model_of(QWEN_2_5 | changes, tmp_path).sliding_window == window


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", {"n_special": 0, "predict_special_tokens": True, "output_past": True}),  # GPT-2 large
        ("llama", {"is_llama_config": True, "transformers.js_config": {"a": {}}}),
        ("mistral", {"sliding_window": None, "rope_theta": 1e6, "head_dim": 4}),  # Mistral 7B v0.3
    ],
)
def test_entries_of_published_files_are_taken(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert model_of(FILES[kind] | changes, tmp_path).num_layers == 2


NOT_ONE = "its layers do not have one window all of them, or none (layer_types, max_window_layers and "


@pytest.mark.parametrize(
    ("kind", "changes", "rule"),
    [
        ("qwen2", SLIDING | {"max_window_layers": 1}, NOT_ONE),
        ("qwen2", SLIDING | {"layer_types": ["full_attention", "sliding_attention"]}, NOT_ONE),
        ("qwen2", SLIDING | {"layer_types": ["chunked_attention"] * 2}, NOT_ONE),
        ("qwen2", SLIDING | {"layer_types": ["full_attention"]}, NOT_ONE),
        ("qwen2", SLIDING | {"layer_types": 2}, NOT_ONE),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, NOT_ONE),
        (
            "qwen2",
            {"use_sliding_window": 1},
            "use_sliding_window in its config.json is 1; it must be true or",
        ),
        ("qwen2", SLIDING | {"max_window_layers": None}, "max_window_layers in its config.json is null; it"),
        ("qwen2", {"sliding_window": "8"}, 'sliding_window in its config.json is "8"; it must be a whole'),
        ("qwen2", {"attention_bias": True}, "nothing here takes attention_bias = true of its config.json"),
        ("qwen2", {"use_mrope": True}, "use_mrope in its config.json is true; it must be false"),
        ("gpt2", {"n_special": 2}, "n_special in its config.json is 2; it must be 0"),
        ("qwen3", {"head_dim": None}, "head_dim in its config.json is null; it must be a whole number"),
        ("qwen3", {"hidden_act": "gelu"}, 'hidden_act in its config.json is "gelu"; it must be "silu"'),
        ("mistral", {"layer_types": ["full_attention"]}, "nothing here takes layer_types = [...] of its"),
        ("llama", {"sliding_window": 8}, "nothing here takes sliding_window = 8 of its config.json"),
        (
            "llama",
            {"model_type": "gemma2"},
            'holds a model of type "gemma2"; gpt2, llama, mistral, qwen2 and',
        ),
        (
            "llama",
            {"num_hidden_layers": 0},
            "makes model.num_layers=0 (num_hidden_layers in its config.json)",
        ),
        ("gpt2", {"n_embd": -8}, "makes model.hidden_size=-8 (n_embd in its config.json): must be"),
        ("gpt2", {"n_positions": "1"}, 'n_positions in its config.json is "1"; it must be a whole number'),
    ],
)
def test_what_changes_the_network_and_is_not_built_is_refused_by_name(
    kind: str, changes: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    faults = refusals(FILES[kind] | changes, tmp_path)
    assert faults[0].startswith(f"model.path={tmp_path}: {rule}")


def test_samples_that_are_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    assert refusals(FILES["mistral"] | {"max_position_embeddings": 8}, tmp_path) == [
        "batch.seq_length=16: model.path holds a model with 8 (max_position_embeddings in its config.json). "
        "Set batch.seq_length=8."
    ]


def test_what_a_recipe_gives_beside_the_folder_is_the_folders(tmp_path: Path) -> None:
    given = ("model.num_layers", "model.head_dim", "model.qk_norm", "model.family", "model.dropout")
    assert refusals(QWEN_3, tmp_path, *given, num_layers=3, head_dim=8, dropout=0.5) == [
        'model.family=gpt: model.path holds a model with "llama". Set model.family=llama.',
        "model.num_layers=3: model.path holds a model with 2 (num_hidden_layers in its config.json). Set "
        "model.num_layers=2.",
        "model.qk_norm=false: model.path holds a model with true. Set model.qk_norm=true.",
    ]
    assert planned(str(tmp_path), "model.num_layers=2", "model.dropout=0.5").config.model.dropout == 0.5


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "config.json: No such file or directory. Give a folder written by trireme export, or by"),
        ("[]", "config.json holds no JSON object. Give a folder"),
        ("[" * 200_000, "its JSON is nested too deeply. Give a folder"),
    ],
)
def test_a_folder_without_a_config_is_refused(
    content: str | None, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["plan", "quickstart", "model=hf", f"model.path={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert rule in told
    assert f"[override model.path={tmp_path}]" in told


def test_the_file_of_the_group_asks_for_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "model=hf"]) == 2
    assert "Give model.hidden_size, or model.path." in capsys.readouterr().err


def test_layers_of_ones_own_have_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=x: has no effect while model\.family is custom"):
        make_plan("quickstart", ("model=custom", "model.target=a:b", "model.path=x"))


@pytest.mark.parametrize(("window", "told"), [(16, None), (3, "model.sliding_window=null: train.init_from")])
def test_a_window_as_long_as_the_samples_is_none(window: int, told: str | None, tmp_path: Path) -> None:
    entries = FILES["mistral"] | {"sliding_window": window}
    model = vars(model_of(entries, tmp_path)) | {"sliding_window": None}
    config = launch_config(model=model, batch={"seq_length": SEQ})
    config = with_settings(config, {"train": {"init_from": str(tmp_path)}})
    write_folder(tmp_path, entries, config)
    faults = [str(fault) for fault in initial_weights_faults(config)]
    assert len(faults) == (told is not None)
    if told is not None:
        assert faults[0].startswith(f"{told} holds a model with 3 (sliding_window in its config.json). Set ")
    assert config_of(config.model, SEQ, "float32", entries)["sliding_window"] == (
        window if not told else None
    )


def test_a_model_that_no_format_has_a_place_for_is_not_exported() -> None:
    model = launch_config(
        model={"family": "llama", "attention_bias": "qkv", "qk_norm": True, "sliding_window": 3}
    ).model
    with pytest.raises(
        JobError,
        match=r"attention_bias=qkv, model\.qk_norm=true and model\.sliding_window=3 are together in none of "
        "gpt2, llama, mistral, qwen2, qwen3: their formats have no place for such a model",
    ):
        config_of(model, SEQ, "float32")
