"""The parameters of a GPT or Llama model by their global names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.contract.config import ModelConfig
from launcher.contract.model.shape import ParameterShape
from launcher.contract.model.sizes import Sizes
from launcher.contract.model.tensors import BIASED, EMBEDDING

_SPLIT_BY_ROWS = ("attention.out", "mlp.down")
"""Linears whose bias is added after a sum over the tensor-parallel ranks, each of which has all of it."""


def parameters_of(model: ModelConfig, seq_length: int) -> Iterator[ParameterShape]:
    """Of the whole model; a tied one is there twice."""
    sizes = Sizes.of(model, seq_length)
    yield from embedding_parameters(model, sizes)
    for index in range(model.num_layers or 0):
        yield from (
            replace(each, name=f"layers.{index}.{each.name}") for each in layer_parameters(model, sizes)
        )
    yield from head_parameters(model, sizes)


def embedding_parameters(model: ModelConfig, sizes: Sizes) -> tuple[ParameterShape, ...]:
    """Of the token table and, for gpt, the table of positions."""
    tokens = ParameterShape(name=f"{EMBEDDING}.weight", shape=(sizes.vocab, sizes.hidden), is_split=True)
    positions = ParameterShape(name="positions.weight", shape=(sizes.positions, sizes.hidden))
    return (tokens, positions) if model.family == "gpt" else (tokens,)


def layer_parameters(model: ModelConfig, sizes: Sizes) -> tuple[ParameterShape, ...]:
    """Of one layer, without its number."""
    hidden, is_gpt = sizes.hidden, model.family == "gpt"
    linears = {
        "attention.q": (sizes.queries, hidden),
        "attention.k": (sizes.keys, hidden),
        "attention.v": (sizes.keys, hidden),
        "attention.out": (hidden, sizes.queries),
        **({} if is_gpt else {"mlp.gate": (sizes.ffn, hidden)}),
        "mlp.up": (sizes.ffn, hidden),
        "mlp.down": (hidden, sizes.ffn),
    }
    matrices = (
        ParameterShape(name=f"{name}.weight", shape=shape, is_split=True) for name, shape in linears.items()
    )
    biased = linears if is_gpt else [f"attention.{part}" for part in BIASED[model.attention_bias]]
    biases = (
        ParameterShape(name=f"{name}.bias", shape=linears[name][:1], is_split=name not in _SPLIT_BY_ROWS)
        for name in biased
    )
    norms = (part for name in ("attention_norm", "mlp_norm") for part in _norm(model, name, hidden))
    heads = [f"attention.{part}_norm" for part in ("qk" if model.qk_norm else "")]
    return (*matrices, *biases, *norms, *(part for name in heads for part in _norm(model, name, sizes.head)))


def head_parameters(model: ModelConfig, sizes: Sizes) -> tuple[ParameterShape, ...]:
    """Of the last norm and the output matrix."""
    head = EMBEDDING if model.tied_embeddings else "head"
    matrix = ParameterShape(name=f"{head}.weight", shape=(sizes.vocab, sizes.hidden), is_split=True)
    return (*_norm(model, "norm", sizes.hidden), matrix)


def _norm(model: ModelConfig, name: str, size: int) -> Iterator[ParameterShape]:
    kinds = ("weight", "bias") if model.family == "gpt" else ("weight",)
    return (ParameterShape(name=f"{name}.{kind}", shape=(size,)) for kind in kinds)
