"""A folder in Hugging Face's format is what the recipe takes it for, or is refused before anything starts."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.app.planning import make_plan
from launcher.app.preflight import seen_faults
from launcher.base.errors import JobError, PlanError
from launcher.cli.main import main
from launcher.contract.config import LaunchConfig
from launcher.contract.model.config_json import config_of
from launcher.contract.model.folder import INDEX, WEIGHTS, initial_weights_faults
from launcher.contract.model.rope import RopeScaling
from launcher.contract.model.tensors import file_tensors
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.plan.checked_job import PlanInputs
from launcher.plan.cost.shapes import model_shape, resolve_model
from tests.helpers.configs import launch_config, with_settings
from tests.helpers.pretrained_folders import GPT_2, LLAMA_3_1, write_folder, write_weights

SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 16,
        "num_kv_heads": 2,
        "ffn_size": 24,
        "rope_theta": 500000.0,
        "rope_scaling": SCALING,
    },
    "gpt": {"num_layers": 2, "hidden_size": 16, "tied_embeddings": True, "max_position_embeddings": 32},
}
FILES = {"llama": LLAMA_3_1, "gpt": GPT_2}
FAMILIES = list(FILES)


KNOWN = "gpt2, llama, mistral, qwen2 and qwen3 can be read"


def recipe_for(family: str, folder: Path, **changes: Any) -> LaunchConfig:
    config = launch_config(model=MODELS[family] | changes, batch={"seq_length": 16})
    return with_settings(config, {"train": {"init_from": str(folder)}})


def faults_of(folder: Path, family: str, config: dict[str, Any], **changes: Any) -> list[str]:
    write_folder(folder, config, recipe_for(family, folder))
    return [str(fault) for fault in initial_weights_faults(recipe_for(family, folder, **changes))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_published_file_of_the_family_is_taken(family: str, tmp_path: Path) -> None:
    assert faults_of(tmp_path, family, FILES[family]) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_is_taken_again(family: str, tmp_path: Path) -> None:
    recipe = recipe_for(family, tmp_path)
    assert faults_of(tmp_path, family, config_of(recipe.model, 16, "float32")) == []


@pytest.mark.parametrize(
    ("family", "entry", "value", "setting", "given"),
    [
        ("gpt", "n_layer", 3, "model.num_layers", "2"),
        ("gpt", "n_inner", 48, "model.ffn_size", "null"),
        ("gpt", "layer_norm_epsilon", 1e-6, "model.norm_eps", "1e-05"),
        ("gpt", "tie_word_embeddings", False, "model.tied_embeddings", "true"),
        ("gpt", "n_positions", 64, "model.max_position_embeddings", "32"),
        ("gpt", "n_positions", 8, "batch.seq_length", "16"),
        ("llama", "head_dim", 8, "model.head_dim", "null"),
        ("llama", "num_key_value_heads", None, "model.num_kv_heads", "2"),
        ("llama", "max_position_embeddings", 8, "batch.seq_length", "16"),
        ("llama", "rope_theta", 10000, "model.rope_theta", "500000.0"),
        ("llama", "rms_norm_eps", 0.5, "model.norm_eps", "1e-05"),
    ],
)
def test_a_setting_of_another_model_is_named_with_its_value(
    family: str, entry: str, value: Any, setting: str, given: str, tmp_path: Path
) -> None:
    shown = json.dumps(value)
    rule = f"train.init_from holds a model with {shown} ({entry} in its config.json)"
    assert faults_of(tmp_path, family, FILES[family] | {entry: value}) == [
        f"{setting}={given}: {rule}. Set {setting}={shown}."
    ]


def test_a_model_of_the_other_family_is_named_with_its_family(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, "llama", GPT_2)
    assert fault == "model.family=llama: train.init_from holds a model of type gpt2. Set model.family=gpt."


@pytest.mark.parametrize("scaling", [SCALING, None])
def test_the_scaling_of_the_file_is_given_as_it_is_typed(scaling: RopeScaling | None, tmp_path: Path) -> None:
    other = None if scaling else LLAMA_3_1["rope_scaling"]
    (fault,) = faults_of(tmp_path, "llama", LLAMA_3_1 | {"rope_scaling": other}, rope_scaling=scaling)
    assert (
        f"holds a model with {'none' if scaling else 'another'} (rope_scaling in its config.json). Set "
        in fault
    )
    (typed,) = shlex.split(fault.rpartition("Set ")[2].removesuffix("."))
    words = ("model=llama", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2")
    planned = make_plan("quickstart", (*words, "model.vocab_size=256", typed)).plan
    assert planned.config.model.rope_scaling == (None if scaling else SCALING)


@pytest.mark.parametrize(
    ("family", "changes", "rule"),
    [
        ("llama", {"model_type": "gemma2"}, f'holds a model of type "gemma2"; {KNOWN}'),
        ("llama", {"model_type": None}, f"holds a model of type null; {KNOWN}"),
        ("llama", {"model_type": ["llama"]}, f"holds a model of type [...]; {KNOWN}"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act in its config.json is "gelu"; it must be "silu"'),
        ("llama", {"mlp_bias": True}, "mlp_bias in its config.json is true; it must be false"),
        ("llama", {"attention_bias": 1}, "attention_bias in its config.json is 1; it must be true or false"),
        ("llama", {"hidden_size": "16"}, 'hidden_size in its config.json is "16"; it must be a whole number'),
        ("llama", {"hidden_size": True}, "hidden_size in its config.json is true; it must be a whole number"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps in its config.json is null; it must be a number"),
        (
            "llama",
            {"quantization_config": {}},
            "nothing here takes quantization_config = {...} of its",
        ),
        (
            "llama",
            {"sliding_window": 8},
            "nothing here takes sliding_window = 8 of its",
        ),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor in its config.json is 0.5;",
        ),
        (
            "llama",
            {"rope_scaling": "x"},
            'rope_scaling in its config.json is "x"; it must be a group of settings',
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            'rope_scaling in its config.json is of type "linear"; built are llama3\'s scaling, and none',
        ),
        (
            "llama",
            {"rope_scaling": {"factor": 2.0}},
            "rope_scaling in its config.json has factor and no rope_type; built are",
        ),
        (
            "llama",
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": "4",
                }
            },
            'rope_scaling.high_freq_factor in its config.json is "4": must be a finite number above 0',
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default"}},
            "the scaling in its config.json is not the same in rope_scaling and rope_parameters",
        ),
        (
            "llama",
            {"rope_scaling": LLAMA_3_1["rope_scaling"] | {"rope_theta": 1e4}},
            "rope_theta in its config.json is not the same in rope_scaling and beside it",
        ),
        (
            "gpt",
            {"scale_attn_weights": False},
            "scale_attn_weights in its config.json is false;",
        ),
        ("gpt", {"hidden_size": 16}, "nothing here takes hidden_size = 16 of its"),
        (
            "gpt",
            {"rope_theta": 1e4},
            "nothing here takes rope_theta = 10000.0 of its",
        ),
        ("gpt", {"x": [[]]}, "nothing here takes x = [...] of its"),
    ],
)
def test_what_no_recipe_can_set_is_refused_by_name(
    family: str, changes: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    (fault,) = faults_of(tmp_path, family, FILES[family] | changes)
    assert fault.startswith(f"train.init_from={tmp_path}: {rule}")


@pytest.mark.parametrize("entry", ["n_embd", "n_layer", "n_head", "vocab_size"])
def test_a_size_that_is_missing_is_named(entry: str, tmp_path: Path) -> None:
    config = {name: value for name, value in GPT_2.items() if name != entry}
    (fault,) = faults_of(tmp_path, "gpt", config)
    assert f"its config.json has no {entry}; it must be a whole number" in fault


def test_gpt2_has_no_place_for_shared_keys_and_for_other_heads(tmp_path: Path) -> None:
    for name, value in (("num_kv_heads", 2), ("head_dim", 8)):
        (fault,) = faults_of(tmp_path, "gpt", GPT_2, **{name: value})
        assert (
            fault == f"model.{name}={value}: train.init_from holds a model with null. Set model.{name}=null."
        )
    model = replace(recipe_for("gpt", tmp_path).model, head_dim=8)
    with pytest.raises(JobError, match=r"num_heads = 4 wide, and model\.head_dim=8: its format has no"):
        config_of(model, 16, "float32")


def test_entries_of_the_first_model_that_training_did_not_change_are_exported(tmp_path: Path) -> None:
    for family, original in FILES.items():
        recipe = recipe_for(family, tmp_path)
        written = config_of(recipe.model, 16, "float16", original)
        changed = {"llama": {}, "gpt": {"embd_pdrop": 0.0, "resid_pdrop": 0.0}}[family]
        added = {name: written[name] for name in written if name not in original}
        assert written == original | changed | added | {"torch_dtype": "float16"}
        assert added["dtype"] == "float16"


def llama_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in file_tensors(recipe_for("llama", folder).model, 16)}


NOT_ITS = "which a model of its config.json does not have"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({Q: (32, 16)}, f"{Q} is [32, 16], and by its config.json [16, 16]. Give a folder"),
        ({Q: None}, f"{Q} is in no file of it. Give a folder"),
        ({f"{Q[:-6]}bias": (16,)}, f"it holds {Q[:-6]}bias, {NOT_ITS}. Give"),
        (
            {f"model.layers.{index}.x": (1,) for index in range(5)},
            f"it holds model.layers.0.x, {NOT_ITS}; it holds model.layers.1.x, {NOT_ITS}; it holds "
            f"model.layers.2.x, {NOT_ITS}; and 2 more. Give a folder",
        ),
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}, None),
    ],
)
def test_every_tensor_has_the_shape_that_the_config_gives_it(
    changes: dict[str, Any], rule: str | None, tmp_path: Path
) -> None:
    assert faults_of(tmp_path, "llama", LLAMA_3_1) == []
    shapes = {name: shape for name, shape in (llama_shapes(tmp_path) | changes).items() if shape is not None}
    write_weights(tmp_path / WEIGHTS, shapes)
    faults = [str(fault) for fault in initial_weights_faults(recipe_for("llama", tmp_path))]
    assert len(faults) == (rule is not None)
    if rule is not None:
        assert faults[0].startswith(f"train.init_from={tmp_path}: {rule}")


def test_names_may_miss_the_prefix_of_a_model_without_a_head(tmp_path: Path) -> None:
    for family, prefix in (("gpt", "transformer."), ("llama", "model.")):
        assert faults_of(tmp_path, family, FILES[family]) == []
        recipe = recipe_for(family, tmp_path)
        shapes = {tensor.name.removeprefix(prefix): tensor.shape for tensor in file_tensors(recipe.model, 16)}
        write_weights(tmp_path / WEIGHTS, shapes)
        assert initial_weights_faults(recipe) == []


NO_FILE = f"{WEIGHTS} is no safetensors file, or not all of one"


def header(content: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("<Q", len(content)) + content + rest


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", NO_FILE),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            NO_FILE,
        ),
        (pickle.dumps({"a": [1] * 99}), NO_FILE),
        (b"\xff" * 8 + b"{}", NO_FILE),
        (header(b"{"), f"{WEIGHTS} holds no JSON: "),
        (header(b"[]"), f"{WEIGHTS} holds no JSON object"),
        (header(b"[" * 200_000), "its JSON is nested too deeply"),
        (header(b"9" * 5000), f"{WEIGHTS} holds no JSON: "),
        (header(b"{}", b"more"), f"{WEIGHTS} has 14 bytes, and by its header 10: it is not whole"),
        (header(b'{"x": []}'), f"{WEIGHTS} has no shape of x"),
        (header(b'{"x": {"dtype": "F32", "shape": [-1]}}'), f"{WEIGHTS} has no shape of x"),
        (header(b'{"x": {"dtype": "F32", "shape": [true]}}'), f"{WEIGHTS} has no shape of x"),
        (
            header(b'{"x": {"dtype": "F8_E4M3", "shape": []}}'),
            f"x in {WEIGHTS} has numbers of type F8_E4M3; those that are read: F64, F32, F16, BF16",
        ),
    ],
)
def test_a_file_that_is_not_in_the_format_is_refused(content: bytes, rule: str, tmp_path: Path) -> None:
    assert faults_of(tmp_path, "llama", LLAMA_3_1) == []
    (tmp_path / WEIGHTS).write_bytes(content)
    (fault,) = initial_weights_faults(recipe_for("llama", tmp_path))
    assert str(fault).startswith(f"train.init_from={tmp_path}: {rule}")
    assert str(fault).endswith(
        "Give a folder written by trireme export, or by Hugging Face's save_pretrained."
    )


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"\xff", "config.json holds no JSON: "),
        (b"[]", "config.json holds no JSON object"),
        (b"[" * 200_000, "its JSON is nested too deeply"),
    ],
)
def test_a_config_of_another_form_is_refused(content: bytes, rule: str, tmp_path: Path) -> None:
    assert faults_of(tmp_path, "llama", LLAMA_3_1) == []
    (tmp_path / "config.json").write_bytes(content)
    (fault,) = initial_weights_faults(recipe_for("llama", tmp_path))
    assert str(fault).startswith(f"train.init_from={tmp_path}: {rule}")


def sharded(folder: Path) -> dict[str, str]:
    """The weights in two files, and their index."""
    write_folder(folder, LLAMA_3_1, recipe_for("llama", folder))
    (folder / WEIGHTS).unlink()
    shapes = llama_shapes(folder)
    where = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(shapes)}
    for file in set(where.values()):
        write_weights(folder / file, {name: shapes[name] for name in shapes if where[name] == file})
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return where


@pytest.mark.parametrize(
    ("index", "rule"),
    [
        ([], f"{INDEX} holds no JSON object"),
        ({"weight_map": []}, f"{INDEX} has no weight_map"),
        ({"weight_map": {}}, f"{INDEX} has no weight_map"),
        ({"weight_map": {Q: ["a"]}}, f'{INDEX} names ["a"], which is no safetensors file beside it'),
        ({"weight_map": {Q: json.loads("[" * 400 + "]" * 400)}}, f"{INDEX} names [[[["),
        ({"weight_map": {Q: "../a.safetensors"}}, f'{INDEX} names "../a.safetensors", which is no'),
        ({"weight_map": {Q: "/a.safetensors"}}, f'{INDEX} names "/a.safetensors", which is no'),
        ({"weight_map": {Q: "pytorch_model.bin"}}, f'{INDEX} names "pytorch_model.bin", which is no'),
        ({"weight_map": {Q: "gone.safetensors"}}, "has no gone.safetensors"),
        ({"weight_map": {Q: "a\0.safetensors"}}, "has no a"),
        (
            {"weight_map": {Q: "model-1.safetensors"}},
            f"{INDEX} has {Q} in model-1.safetensors, which",
        ),
        ({"weight_map": {Q: "model-0.safetensors"}}, "model.layers.0.input_layernorm.weight is in no file"),
    ],
)
def test_an_index_leads_to_files_beside_it_that_hold_what_it_says(
    index: Any, rule: str, tmp_path: Path
) -> None:
    where = sharded(tmp_path)
    assert where[Q] == "model-0.safetensors"
    assert initial_weights_faults(recipe_for("llama", tmp_path)) == []
    (tmp_path / INDEX).write_text(json.dumps(index))
    (fault,) = initial_weights_faults(recipe_for("llama", tmp_path))
    assert str(fault).startswith(f"train.init_from={tmp_path}: {rule}")


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    faults_of(tmp_path, "llama", LLAMA_3_1)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    (fault,) = initial_weights_faults(recipe_for("llama", tmp_path))
    assert "pytorch_model.bin is not read: a pickle can run any code. Give a folder" in str(fault)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults_of(tmp_path, "llama", LLAMA_3_1)

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    (fault,) = initial_weights_faults(recipe_for("llama", tmp_path))
    assert str(fault).startswith(
        f"train.init_from={tmp_path}: {tmp_path}/config.json: Permission denied. Give"
    )


GEMMA = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}


@pytest.mark.parametrize(
    "verb",
    [
        ("plan",),
        ("submit", "--dry-run"),
        ("run",),
        ("sweep", "plan"),
    ],
)
def test_another_architecture_is_refused_before_anything_starts(
    verb: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in_corpus: None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    (tmp_path / WEIGHTS).touch()
    words, flags = [word for word in verb if word[0] != "-"], [word for word in verb if word[0] == "-"]
    points = ["seed=1,2"] if words[0] == "sweep" else []
    code = main([*words, "quickstart", f"train.init_from={tmp_path}", *points, *flags])
    shown = capsys.readouterr()
    assert 'holds a model of type "gemma2"; gpt2, llama' in " ".join((shown.out + shown.err).split())
    assert code != 0 or points


def test_a_plan_is_made_where_the_folder_is_not(tmp_path: Path) -> None:
    away = f"train.init_from={tmp_path}/elsewhere"
    assert main(["plan", "quickstart", away]) == 0


def test_what_lies_in_a_container_is_not_looked_for_here(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    plan = planned(with_settings(recipe_for("gpt", tmp_path), {"site": {}}))
    assert len(seen_faults(plan)) == 1
    site = replace(plan.config.site, container_image="x.sqsh")
    assert seen_faults(replace(plan, config=replace(plan.config, site=site))) == []


def planned(config: LaunchConfig) -> Plan:
    return build(config, inputs=PlanInputs())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"max_position_embeddings": 64},
            r"embeddings=64: has no effect on family llama",
        ),
        (
            "gpt",
            {"max_position_embeddings": 8},
            r"embeddings=8: the samples of batch\.seq_length = 16",
        ),
        (
            "llama",
            {"rope_scaling": replace(SCALING, low_freq_factor=4.0)},
            r"rope_scaling\.high_freq_factor=4\.0: must be above low_freq_factor = 4",
        ),
        ("llama", {"head_dim": 5}, r"model\.head_dim=5: must be even .* Set model\.head_dim=6 or null"),
        (
            "custom",
            {"head_dim": 4, "target": "a:b"},
            r"model\.head_dim=4: has no effect on a model of family custom",
        ),
    ],
)
def test_positions_and_heads_that_cannot_be_are_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    known = MODELS.get(family, {"family": "custom"})
    with pytest.raises(PlanError, match=message):
        planned(launch_config(model=known | changes, batch={"seq_length": 16}))


def test_wider_heads_and_a_longer_table_are_counted() -> None:
    def count(family: str, **changes: Any) -> int:
        model = resolve_model(launch_config(model=MODELS[family] | changes).model)
        return model_shape(model, 16, has_fused_norm=True).num_parameters

    # queries and output 4 heads, keys and values 2: each of hidden_size rows or columns, in each of 2 layers
    assert count("llama", head_dim=8) - count("llama") == 2 * 16 * (8 - 4) * (4 + 4 + 2 + 2)
    assert count("gpt") - count("gpt", max_position_embeddings=None) == (32 - 16) * 16


def test_nothing_of_the_weights_is_read(tmp_path: Path) -> None:
    """The file is as large as a model and holds no bytes: to read it would take minutes."""
    faults_of(tmp_path, "llama", LLAMA_3_1)
    text = json.dumps({"x": {"dtype": "F32", "shape": [1 << 38]}}).encode()
    path = tmp_path / WEIGHTS
    path.write_bytes(header(text))
    os.truncate(path, 8 + len(text) + (4 << 38))
    (fault,) = initial_weights_faults(recipe_for("llama", tmp_path))
    assert "model.embed_tokens.weight is in no file of it" in str(fault)
