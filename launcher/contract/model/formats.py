"""What each entry of a ``config.json`` means, by its ``model_type``: the models of Hugging Face's format.

An entry is a setting of the model, or tells some of them together; or `FIXED`, as layers here compute one
thing; or `FREE`, as no logit depends on it. Any other is refused by name, unless it is null: transformers
passes over what it does not know, but whoever wrote it may have trained a model that depends on it.

    model_type   attention_bias   qk_norm   sliding_window
    gpt2         -                -         -
    llama        none, all        no        none
    mistral      none             no        any
    qwen2        qkv              no        any
    qwen3        none, all        yes       any

Source: the configurations of these models, PreTrainedConfig and modeling_rope_utils of transformers 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.base.errors import JobError
from launcher.contract.config import ModelConfig

CONFIG = "config.json"
FIXED: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "partial_rotary_factor": (1.0, None),
    "use_mrope": (False,),
    "n_special": (0,),
}
"""The values of entries of any format that stand for what the layers here compute."""
_LLAMA_SETTINGS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_size",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tied_embeddings",
    "rms_norm_eps": "norm_eps",
}
_LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}
_SWITCHED_WINDOW = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
"""How Qwen's files tell a window, each entry with its default."""
ROPE_GROUPS = ("rope_scaling", "rope_parameters")
"""The scaling of rotary positions: beside ``rope_theta`` up to transformers 4, and since then with it."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """The entries of one ``model_type``."""

    model_type: str
    family: str
    architecture: str
    """The class of transformers, as ``architectures`` names it."""
    settings: Mapping[str, str] = field(default_factory=lambda: _LLAMA_SETTINGS)
    """Settings of the model, each by the one entry that tells it."""
    length: str = "max_position_embeddings"
    """The longest context: of gpt the rows of a table, of llama a number that no layer reads."""
    defaults: Mapping[str, Any]
    """What the format means where a file has no such entry. All other sizes have to be there."""
    fixed: Mapping[str, tuple[Any, ...]]
    """The same of this format's own entries, the one that is written first."""
    attention_bias: str | None = None
    """That of all its models; None: ``attention_bias`` tells whether it is ``all``."""
    qk_norm: bool = False
    windows: Mapping[str, Any] = field(default_factory=dict)
    """The entries that tell a window, with their defaults; empty: there is none."""

    @property
    def has_rope(self) -> bool:
        """Whether its positions are rotary ones."""
        return self.family == "llama"

    @property
    def told(self) -> frozenset[str]:
        """Every entry that tells settings of the model."""
        bias = () if self.attention_bias else ("attention_bias",)
        rope = ("rope_theta", *ROPE_GROUPS) if self.has_rope else ()
        return frozenset((*self.settings, self.length, *self.windows, *bias, *rope))

    def holds(self, model: ModelConfig) -> bool:
        """Whether it has a place for what a model's attention consists of."""
        biases = ("none", "all") if self.attention_bias is None else (self.attention_bias,)
        is_same = model.attention_bias in biases and model.qk_norm == self.qk_norm
        return model.family == self.family and is_same and (bool(self.windows) or not model.sliding_window)


_FORMATS = (
    Format(
        model_type="gpt2",
        family="gpt",
        architecture="GPT2LMHeadModel",
        settings={
            "n_layer": "num_layers",
            "n_embd": "hidden_size",
            "n_head": "num_heads",
            "n_inner": "ffn_size",
            "vocab_size": "vocab_size",
            "tie_word_embeddings": "tied_embeddings",
            "layer_norm_epsilon": "norm_eps",
        },
        length="n_positions",
        defaults={
            "n_inner": None,
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "n_positions": 1024,
        },
        fixed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        attention_bias="none",  # which says nothing of gpt: its biases are no setting
    ),
    Format(
        model_type="llama",
        family="llama",
        architecture="LlamaForCausalLM",
        defaults=_LLAMA_DEFAULTS | {"max_position_embeddings": 2048},
        fixed={"hidden_act": ("silu",), "mlp_bias": (False,)},
    ),
    Format(
        model_type="mistral",
        family="llama",
        architecture="MistralForCausalLM",
        defaults=_LLAMA_DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072},
        fixed={"hidden_act": ("silu",)},
        attention_bias="none",
        windows={"sliding_window": 4096},
    ),
    Format(
        model_type="qwen2",
        family="llama",
        architecture="Qwen2ForCausalLM",
        defaults=_LLAMA_DEFAULTS | {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        fixed={"hidden_act": ("silu",)},
        attention_bias="qkv",
        windows=_SWITCHED_WINDOW,
    ),
    Format(
        model_type="qwen3",
        family="llama",
        architecture="Qwen3ForCausalLM",
        defaults=_LLAMA_DEFAULTS
        | {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        fixed={"hidden_act": ("silu",)},
        qk_norm=True,
        windows=_SWITCHED_WINDOW,
    ),
)
FORMATS = {one.model_type: one for one in _FORMATS}
"""By ``model_type``; the first that holds a model is the one that it is exported in."""
_FREE = {
    "labels": """_name_or_path _commit_hash transformers_version architectures unsloth_version unsloth_fixed
        finetuning_task task_specific_params tokenizer_class prefix model_type is_llama_config
        transformers.js_config""",
    "the format of the weights' numbers, which each tensor has itself": "dtype torch_dtype use_bfloat16",
    "tokens": """bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
        predict_special_tokens""",
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
        tf_legacy_loss return_dict output_past output_hidden_states output_attentions is_decoder
        tie_encoder_decoder""",
    "n_positions again, which GPT-2's layers do not read": "n_ctx",
}
FREE = frozenset(name for names in _FREE.values() for name in names.split())
"""Entries that no logit depends on."""


def format_of(model: ModelConfig, original: Mapping[str, Any] | None = None) -> Format:
    """The format that a model is written in: that of ``original``, which it began with, or the first that
    holds it.

    Raises:
        JobError: when none does.
    """
    kept = FORMATS.get((original or {}).get("model_type", ""))
    for one in (*([kept] if kept else []), *FORMATS.values()):
        if one.holds(model):
            return one
    raise JobError(
        f"model.attention_bias={model.attention_bias}, model.qk_norm={str(model.qk_norm).lower()} and "
        f"model.sliding_window={'null' if model.sliding_window is None else model.sliding_window} are "
        f"together in none of {', '.join(FORMATS)}: their formats have no place for such a model"
    )
