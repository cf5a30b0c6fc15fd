"""GPT-2 and Llama models in Hugging Face's format: how their files name, join and transpose our tensors.

    ours                                              theirs
    layers.0.attention.{q,k,v}.weight  [out, in]      GPT-2: one h.0.attn.c_attn.weight  [in, 3 * out]
                                                      Llama: self_attn.{q,k,v}_proj.weight  [out, in]

GPT-2 stores its matrices transposed. Neither file holds a head that is tied to the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.base.errors import JobError
from launcher.contract.config import ModelConfig
from launcher.runtime.model.blocks import Sizes
from launcher.runtime.model.build import EMBEDDING

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """One tensor of a file."""

    name: str
    parts: tuple[tuple[str, Shape], ...]
    """Our tensors by name and shape, joined along their first dim."""
    is_transposed: bool = False

    @property
    def shape(self) -> Shape:
        """Its shape in the file."""
        shapes = [shape for _, shape in self.parts]
        joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return joined[::-1] if self.is_transposed else joined


def file_tensors(model: ModelConfig, seq_length: int) -> list[FileTensor]:
    """Every tensor of a model's file.

    Raises:
        JobError: when the format cannot hold such a model.
    """
    sizes = _supported_sizes(model, seq_length)
    tensors = list((_gpt_tensors if model.family == "gpt" else _llama_tensors)(sizes))
    if not model.tied_embeddings:
        tensors.append(_one("lm_head.weight", "head.weight", sizes.vocab, sizes.hidden))
    return tensors


def config_of(model: ModelConfig, seq_length: int, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``. ``dtype``: torch's name of the weights' number format.

    Raises:
        JobError: when the format cannot hold such a model.
    """
    sizes = _supported_sizes(model, seq_length)
    common = {"vocab_size": sizes.vocab, "tie_word_embeddings": model.tied_embeddings, "dtype": dtype}
    common |= {"initializer_range": model.init_std, "bos_token_id": None, "eos_token_id": None}
    return common | (_gpt_config if model.family == "gpt" else _llama_config)(model, sizes)


def config_differences(found: Mapping[str, Any], model: ModelConfig, seq_length: int) -> list[str]:
    """How a folder's ``config.json`` differs from the recipe, in sizes and in what its layers compute."""
    wanted = config_of(model, seq_length, "")
    lengths = ("n_positions", "max_position_embeddings")
    for name in _MAY_DIFFER:
        wanted.pop(name, None)
    return [
        f"{name} is {found.get(name)}, the recipe needs {value}"
        for name, value in wanted.items()
        if not _agrees(found, name, value, at_least=name in lengths)
    ]


def _agrees(found: Mapping[str, Any], name: str, value: Any, *, at_least: bool) -> bool:
    entry = found.get(name, _DEFAULTS.get(name))
    if at_least:
        return isinstance(entry, int) and entry >= value
    if name == "n_inner" and entry is None:
        entry = 4 * int(found.get("n_embd", 0))
    if name == "rope_parameters":  # older files have the base beside the sizes
        entry = entry or {"rope_type": "default", "rope_theta": found.get("rope_theta", 10000.0)}
    return bool(entry == value)


_MAY_DIFFER = (
    *("architectures", "attention_dropout", "attn_pdrop", "bos_token_id", "dtype", "embd_pdrop"),
    *("eos_token_id", "initializer_range", "resid_pdrop", "rope_theta"),
)
"""Entries in which two models with the same weights may differ; the base of rotary positions is compared in
``rope_parameters``."""
_DEFAULTS = {
    "activation_function": "gelu_new",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "rms_norm_eps": 1e-6,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
"""What the format means where a file has no such entry."""


def _supported_sizes(model: ModelConfig, seq_length: int) -> Sizes:
    if model.family == "custom":
        raise JobError("a model of family custom has no Hugging Face format: its layers are your own")
    if model.family == "gpt" and model.num_kv_heads not in (None, model.num_heads):
        raise JobError(
            f"GPT-2 has a key and a value for every head, and model.num_kv_heads={model.num_kv_heads} of "
            f"{model.num_heads}: its format has no place for shared ones"
        )
    return Sizes.of(model, seq_length)


def _gpt_config(model: ModelConfig, sizes: Sizes) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": sizes.hidden,
        "n_layer": sizes.num_layers,
        "n_head": sizes.num_heads,
        "n_inner": sizes.ffn,
        "n_positions": sizes.seq_length,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _llama_config(model: ModelConfig, sizes: Sizes) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "max_position_embeddings": sizes.seq_length,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,  # where releases before 5 read it
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    }


def _one(name: str, own: str, *shape: int, is_transposed: bool = False) -> FileTensor:
    return FileTensor(name=name, parts=((own, shape),), is_transposed=is_transposed)


def _norm(name: str, own: str, size: int) -> list[FileTensor]:
    return [_one(f"{name}.{kind}", f"{own}.{kind}", size) for kind in ("weight", "bias")]


def _linear(name: str, owns: list[str], out_size: int, in_size: int) -> list[FileTensor]:
    """A linear of GPT-2: joined outputs of equal size, with a transposed matrix."""
    weights = tuple((f"{own}.weight", (out_size, in_size)) for own in owns)
    biases = tuple((f"{own}.bias", (out_size,)) for own in owns)
    matrix = FileTensor(name=f"{name}.weight", parts=weights, is_transposed=True)
    return [matrix, FileTensor(name=f"{name}.bias", parts=biases)]


def _gpt_tensors(sizes: Sizes) -> Iterator[FileTensor]:
    hidden = sizes.hidden
    yield _one("transformer.wte.weight", f"{EMBEDDING}.weight", sizes.vocab, hidden)
    yield _one("transformer.wpe.weight", "positions.weight", sizes.seq_length, hidden)
    for index in range(sizes.num_layers):
        theirs, own = f"transformer.h.{index}", f"layers.{index}"
        heads = [f"{own}.attention.{part}" for part in "qkv"]
        yield from _norm(f"{theirs}.ln_1", f"{own}.attention_norm", hidden)
        yield from _linear(f"{theirs}.attn.c_attn", heads, hidden, hidden)
        yield from _linear(f"{theirs}.attn.c_proj", [f"{own}.attention.out"], hidden, hidden)
        yield from _norm(f"{theirs}.ln_2", f"{own}.mlp_norm", hidden)
        yield from _linear(f"{theirs}.mlp.c_fc", [f"{own}.mlp.up"], sizes.ffn, hidden)
        yield from _linear(f"{theirs}.mlp.c_proj", [f"{own}.mlp.down"], hidden, sizes.ffn)
    yield from _norm("transformer.ln_f", "norm", hidden)


def _llama_tensors(sizes: Sizes) -> Iterator[FileTensor]:
    hidden, keys = sizes.hidden, sizes.num_kv_heads * sizes.head
    yield _one("model.embed_tokens.weight", f"{EMBEDDING}.weight", sizes.vocab, hidden)
    for index in range(sizes.num_layers):
        theirs, own = f"model.layers.{index}", f"layers.{index}"
        yield _one(f"{theirs}.input_layernorm.weight", f"{own}.attention_norm.weight", hidden)
        yield _one(f"{theirs}.self_attn.q_proj.weight", f"{own}.attention.q.weight", hidden, hidden)
        yield _one(f"{theirs}.self_attn.k_proj.weight", f"{own}.attention.k.weight", keys, hidden)
        yield _one(f"{theirs}.self_attn.v_proj.weight", f"{own}.attention.v.weight", keys, hidden)
        yield _one(f"{theirs}.self_attn.o_proj.weight", f"{own}.attention.out.weight", hidden, hidden)
        yield _one(f"{theirs}.post_attention_layernorm.weight", f"{own}.mlp_norm.weight", hidden)
        yield _one(f"{theirs}.mlp.gate_proj.weight", f"{own}.mlp.gate.weight", sizes.ffn, hidden)
        yield _one(f"{theirs}.mlp.up_proj.weight", f"{own}.mlp.up.weight", sizes.ffn, hidden)
        yield _one(f"{theirs}.mlp.down_proj.weight", f"{own}.mlp.down.weight", hidden, sizes.ffn)
    yield _one("model.norm.weight", "norm.weight", hidden)
