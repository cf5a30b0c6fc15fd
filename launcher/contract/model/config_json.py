"""What each entry of a ``config.json`` means: GPT-2's and Llama's sizes in Hugging Face's format.

An entry is a setting of the model, and then equal to the recipe's; or `FIXED`, as layers here compute one
thing; or `FREE`, as no logit depends on it. Any other is refused by name, unless it is null: transformers
passes over what it does not know, but whoever wrote it may have trained a model that depends on it.

Source: LlamaConfig, GPT2Config, PreTrainedConfig and modeling_rope_utils of transformers 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.contract.config import ModelConfig
from launcher.contract.model.sizes import Sizes
from launcher.contract.model.tensors import supported_sizes
from launcher.typed.read import plain

CONFIG = "config.json"
ORIGINAL = "init_config.json"
"""In a run directory: that of the model that the training began with."""
MODEL_TYPES = {"gpt": "gpt2", "llama": "llama"}
"""The ``model_type`` of each family."""
LENGTH = {"gpt": "n_positions", "llama": "max_position_embeddings"}
"""The longest context: of gpt the rows of a table, of llama a number that no layer reads."""
SETTINGS = {
    "gpt": {
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_heads",
        "n_inner": "ffn_size",
        "vocab_size": "vocab_size",
        "tie_word_embeddings": "tied_embeddings",
        "layer_norm_epsilon": "norm_eps",
    },
    "llama": {
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "ffn_size",
        "vocab_size": "vocab_size",
        "tie_word_embeddings": "tied_embeddings",
        "rms_norm_eps": "norm_eps",
    },
}
"""Settings of the model, beside the rotary positions."""
ROPE_GROUPS = ("rope_scaling", "rope_parameters")
"""The scaling of rotary positions: beside ``rope_theta`` up to transformers 4, and since then with it."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt": {"n_inner": None, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "n_positions": 1024},
    "llama": {
        "num_key_value_heads": None,
        "head_dim": None,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    },
}
"""What the format means where a file has no such entry. All other sizes have to be there."""
_ALL_FIXED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "partial_rotary_factor": (1.0, None),
}
FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        **_ALL_FIXED,
    },
    "llama": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        **_ALL_FIXED,
    },
}
"""The values that stand for what the layers here compute."""
_FREE = {
    "labels": """_name_or_path _commit_hash transformers_version architectures unsloth_version unsloth_fixed
        finetuning_task task_specific_params tokenizer_class prefix""",
    "the format of the weights' numbers, which each tensor has itself": "dtype torch_dtype use_bfloat16",
    "tokens": "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id",
    "generation of text": """max_length min_length do_sample early_stopping num_beams num_beam_groups
        diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
        no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
        return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
        exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""",
    "training, which the recipe sets": """initializer_range attn_pdrop embd_pdrop resid_pdrop
        attention_dropout gradient_checkpointing""",
    "heads other than the language model's": """id2label label2id num_labels problem_type summary_type
        summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout""",
    "how the same is computed, and what of it is returned": """use_cache pretraining_tp attn_implementation
        _attn_implementation_autoset reorder_and_upcast_attn chunk_size_feed_forward torchscript
        tf_legacy_loss return_dict output_hidden_states output_attentions is_decoder tie_encoder_decoder""",
    "n_positions again, which GPT-2's layers do not read": "n_ctx",
}
FREE = frozenset(name for names in _FREE.values() for name in names.split())
"""Entries that no logit depends on."""


def config_of(
    model: ModelConfig, seq_length: int, dtype: str, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content of ``config.json``.

    ``dtype``: torch's name of the weights' number format. ``original``: the content for the model that the
    training began with; what the training did not change of it stays.

    Raises:
        JobError: when the format cannot hold such a model.
    """
    sizes, family = supported_sizes(model, seq_length), model.family
    values = effective(model, sizes)
    own = {"model_type": MODEL_TYPES[family]} | {name: values[at] for name, at in SETTINGS[family].items()}
    own |= {"dtype": dtype, "torch_dtype": dtype}  # its name before release 5
    others = {"initializer_range": model.init_std, "bos_token_id": None, "eos_token_id": None}
    others |= {name: allowed[0] for name, allowed in FIXED[family].items() if name not in _ALL_FIXED}
    if family == "gpt":
        own |= {"architectures": ["GPT2LMHeadModel"], "n_positions": sizes.positions}
        own |= {"embd_pdrop": model.dropout, "resid_pdrop": model.dropout}
        others["attn_pdrop"] = 0.0
    else:
        own |= {"architectures": ["LlamaForCausalLM"], **_rope_entries(model)}
        others |= {"attention_dropout": 0.0, "max_position_embeddings": seq_length}
    return {**(others if original is None else original), **own}


def effective(model: ModelConfig, sizes: Sizes) -> dict[str, Any]:
    """The values of the `SETTINGS`, none of them null."""
    resolved = {"num_kv_heads": sizes.num_kv_heads, "head_dim": sizes.head, "ffn_size": sizes.ffn}
    return {name: getattr(model, name) for name in SETTINGS["llama"].values()} | resolved


def _rope_entries(model: ModelConfig) -> dict[str, Any]:
    """Base and scaling where releases of transformers before 5 read them, and since."""
    scaling = None if model.rope_scaling is None else plain(model.rope_scaling)
    group = {**(scaling or {"rope_type": "default"}), "rope_theta": model.rope_theta}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling, "rope_parameters": group}
