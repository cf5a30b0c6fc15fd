"""Folders in Hugging Face's format that hold zeros: made without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from launcher.contract.config import LaunchConfig
from launcher.contract.model.folder import WEIGHTS
from launcher.contract.model.from_folder import settled
from launcher.contract.model.tensors import file_tensors
from tests.helpers.configs import launch_config

LLAMA_3_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 256,
}
"""The file of Llama 3.1 8B Instruct, of a smaller model."""
GPT_2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 32,
    "n_embd": 16,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 32,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 256,
}
"""The file of GPT-2, of a smaller model."""

_LIKE_LLAMA = {name: LLAMA_3_1[name] for name in (
    *("attention_dropout", "hidden_act", "hidden_size", "initializer_range", "intermediate_size"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "torch_dtype", "use_cache"),
    "vocab_size",
)}  # fmt: skip
MISTRAL: dict[str, Any] = _LIKE_LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 3,
    "tie_word_embeddings": False,
    "transformers_version": "4.34.0.dev0",
}
"""The file of Mistral 7B v0.1, of a smaller model."""
QWEN_2_5: dict[str, Any] = _LIKE_LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "transformers_version": "4.40.1",
    "use_mrope": False,
    "use_sliding_window": False,
}
"""The file of Qwen2.5 0.5B, of a smaller model."""
QWEN_3: dict[str, Any] = _LIKE_LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 8,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
}
"""The file of Qwen3 0.6B, of a smaller model."""
FILES = {"gpt2": GPT_2, "llama": LLAMA_3_1, "mistral": MISTRAL, "qwen2": QWEN_2_5, "qwen3": QWEN_3}
"""By ``model_type``."""


def model_of_folder(folder: Path, seq_length: int = 8) -> dict[str, Any]:
    """The settings of the model that a recipe has with this folder as model.path."""
    return dict(vars(settled(launch_config(model={"path": str(folder)}).model, seq_length)))


def write_whole_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """A folder with a ``config.json``, and the tensors that it describes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return write_folder(folder, config, launch_config(model=model_of_folder(folder)))


def write_folder(folder: Path, config: Mapping[str, Any], recipe: LaunchConfig) -> Path:
    """A folder with a ``config.json``, and the tensors of a recipe's model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = file_tensors(recipe.model, recipe.batch.seq_length)
    write_weights(folder / WEIGHTS, {tensor.name: tensor.shape for tensor in tensors})
    return folder


def write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> None:
    """A safetensors file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
