"""Parameters and operations against published numbers."""

from __future__ import annotations

import pytest

from launcher.plan.cost.shapes import model_shape, resolve_model, train_flops
from tests.helpers.configs import GPT2, LLAMA3_8B, launch_config

_LLAMA = {"family": "llama", "tied_embeddings": False}
MISTRAL_7B = _LLAMA | {
    **{"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336},
    **{"vocab_size": 32000, "sliding_window": 4096},
}
QWEN2_5_7B = _LLAMA | {
    **{"hidden_size": 3584, "num_layers": 28, "num_heads": 28, "num_kv_heads": 4, "ffn_size": 18944},
    **{"vocab_size": 152064, "attention_bias": "qkv"},
}
QWEN3_0_6B = _LLAMA | {
    **{"hidden_size": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8, "ffn_size": 3072},
    **{"vocab_size": 151936, "head_dim": 128, "qk_norm": True, "tied_embeddings": True},
}

GPT_175B = {"hidden_size": 12288, "num_layers": 96, "num_heads": 96, "vocab_size": 51200}
GPT_530B = {"hidden_size": 20480, "num_layers": 105, "num_heads": 128, "vocab_size": 51200}
GPT_1T = {"hidden_size": 25600, "num_layers": 128, "num_heads": 160, "vocab_size": 51200}
SEQ = 2048


def shape_of(sizes, seq_length):
    return model_shape(resolve_model(launch_config(model=sizes).model), seq_length, has_fused_norm=True)


@pytest.mark.parametrize(
    ("sizes", "seq_length", "num_parameters"),
    [
        (GPT2, 1024, 124_439_808),
        (LLAMA3_8B, 8192, 8_030_261_248),
        (MISTRAL_7B, 8192, 7_241_732_096),
        (QWEN2_5_7B, 8192, 7_615_616_512),
        (QWEN3_0_6B, 8192, 596_049_920),
    ],
    ids=["gpt2", "llama3_8b", "mistral_7b", "qwen2_5_7b", "qwen3_0_6b"],
)
def test_parameters_are_those_of_the_published_checkpoint(sizes, seq_length, num_parameters):
    assert shape_of(sizes, seq_length).num_parameters == num_parameters


@pytest.mark.parametrize("sizes", [GPT_175B, GPT_530B, GPT_1T], ids=["175b", "530b", "1t"])
def test_gpt_flops_are_those_of_korthikanti_equation_7(sizes):
    """72 B s l h^2 (1 + s / 6h + V / 12lh)"""
    h, layers, vocab, samples = sizes["hidden_size"], sizes["num_layers"], sizes["vocab_size"], 16
    published = 72 * samples * SEQ * layers * h**2 * (1 + SEQ / (6 * h) + vocab / (12 * layers * h))
    assert train_flops(shape_of(sizes, SEQ), samples) == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "num_gpus", "global_size", "tflops_per_gpu", "days"),
    [
        (GPT_175B, 384, 1536, 144, 90),
        (GPT_175B, 1536, 1536, 141, 23),
        (GPT_530B, 560, 2240, 171, 156),
        (GPT_530B, 2240, 2240, 159, 42),
    ],
)
def test_flops_give_the_training_days_of_narayanan_table_2(
    sizes, num_gpus, global_size, tflops_per_gpu, days
):
    """300 billion tokens; the published rate counts the recomputed forward of the layers too."""
    shape = shape_of(sizes, SEQ)
    recomputed = sum(layer.forward_flops for layer in shape.layers) * global_size
    step_s = (train_flops(shape, global_size) + recomputed) / (num_gpus * tflops_per_gpu * 1e12)
    num_steps = 300e9 / (global_size * SEQ)
    assert num_steps * step_s / 86400 == pytest.approx(days, rel=0.012)


def test_a_llama_layer_has_gated_mlp_grouped_keys_and_no_bias():
    layer = shape_of(LLAMA3_8B, 1).layers[0]
    h, keys, ffn = 4096, 1024, 14336
    assert layer.num_parameters == h * (2 * h + 2 * keys + 3 * ffn) + 2 * h
    assert layer.num_replicated_parameters == 2 * h


def test_a_tied_head_counts_once():
    tied = shape_of({"tied_embeddings": True}, 32).num_parameters
    untied = shape_of({"tied_embeddings": False}, 32).num_parameters
    assert untied - tied == 256 * 64


def test_the_mlp_of_a_model_that_gives_none_is_four_times_as_wide():
    assert resolve_model(launch_config().model).ffn_size == 256
    assert resolve_model(launch_config(model={"family": "llama"}).model).ffn_size == 256
    assert resolve_model(launch_config(model={"ffn_size": 100}).model).ffn_size == 100
