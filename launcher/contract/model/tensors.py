"""The tensors of a model in Hugging Face's format: how its files name, join and transpose ours.

    ours                                              theirs
    layers.0.attention.{q,k,v}.weight  [out, in]      GPT-2: one h.0.attn.c_attn.weight  [in, 3 * out]
                                                      others: self_attn.{q,k,v}_proj.weight  [out, in]

GPT-2 stores its matrices transposed. No file holds a head that is tied to the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.base.errors import JobError
from launcher.contract.config import ModelConfig
from launcher.contract.model.sizes import Sizes

EMBEDDING = "embedding"
"""Global name of the token table, also where the head is tied to it."""
PREFIXES = ("transformer.", "model.")
"""Missing from the names in files that were saved without a head."""
UNUSED = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)
"""Buffers that older releases wrote beside the weights: the causal mask, and the rotary frequencies."""
BIASED = {"none": (), "qkv": ("q", "k", "v"), "all": ("q", "k", "v", "out")}
"""Linears of the attention that have a bias, by ``model.attention_bias``."""
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
    sizes = supported_sizes(model, seq_length)
    tensors = list(_gpt_tensors(sizes) if model.family == "gpt" else _llama_tensors(model, sizes))
    if not model.tied_embeddings:
        tensors.append(_one("lm_head.weight", "head.weight", sizes.vocab, sizes.hidden))
    return tensors


def supported_sizes(model: ModelConfig, seq_length: int) -> Sizes:
    """The sizes of a model that the format can hold.

    Raises:
        JobError: when it cannot.
    """
    if model.family == "custom":
        raise JobError("a model of family custom has no Hugging Face format: its layers are your own")
    sizes = Sizes.of(model, seq_length)
    if model.family == "gpt" and sizes.num_kv_heads != sizes.num_heads:
        raise JobError(
            f"GPT-2 has a key and a value for every head, and model.num_kv_heads={sizes.num_kv_heads} of "
            f"{sizes.num_heads}: its format has no place for shared ones"
        )
    if model.family == "gpt" and sizes.queries != sizes.hidden:
        raise JobError(
            f"the heads of GPT-2 are hidden_size / num_heads = {sizes.hidden // sizes.num_heads} wide, and "
            f"model.head_dim={sizes.head}: its format has no place for others"
        )
    return sizes


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
    yield _one("transformer.wpe.weight", "positions.weight", sizes.positions, hidden)
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


def _llama_tensors(model: ModelConfig, sizes: Sizes) -> Iterator[FileTensor]:
    hidden, queries, keys = sizes.hidden, sizes.queries, sizes.keys
    yield _one("model.embed_tokens.weight", f"{EMBEDDING}.weight", sizes.vocab, hidden)
    for index in range(sizes.num_layers):
        theirs, own = f"model.layers.{index}", f"layers.{index}"
        yield _one(f"{theirs}.input_layernorm.weight", f"{own}.attention_norm.weight", hidden)
        yield _one(f"{theirs}.self_attn.q_proj.weight", f"{own}.attention.q.weight", queries, hidden)
        yield _one(f"{theirs}.self_attn.k_proj.weight", f"{own}.attention.k.weight", keys, hidden)
        yield _one(f"{theirs}.self_attn.v_proj.weight", f"{own}.attention.v.weight", keys, hidden)
        yield _one(f"{theirs}.self_attn.o_proj.weight", f"{own}.attention.out.weight", hidden, queries)
        for part in BIASED[model.attention_bias]:
            size = {"q": queries, "out": hidden}.get(part, keys)
            yield _one(f"{theirs}.self_attn.{part[0]}_proj.bias", f"{own}.attention.{part}.bias", size)
        for part in "qk" if model.qk_norm else "":
            name = f"{part}_norm.weight"
            yield _one(f"{theirs}.self_attn.{name}", f"{own}.attention.{name}", sizes.head)
        yield _one(f"{theirs}.post_attention_layernorm.weight", f"{own}.mlp_norm.weight", hidden)
        yield _one(f"{theirs}.mlp.gate_proj.weight", f"{own}.mlp.gate.weight", sizes.ffn, hidden)
        yield _one(f"{theirs}.mlp.up_proj.weight", f"{own}.mlp.up.weight", sizes.ffn, hidden)
        yield _one(f"{theirs}.mlp.down_proj.weight", f"{own}.mlp.down.weight", hidden, sizes.ffn)
    yield _one("model.norm.weight", "norm.weight", hidden)
