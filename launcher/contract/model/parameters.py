"""The parameters of a GPT or Llama model by their global names."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.contract.config import ModelConfig
from launcher.contract.model.shape import ParameterShape
from launcher.contract.model.sizes import Sizes
from launcher.contract.model.tensors import EMBEDDING


def embedding_parameters(model: ModelConfig, sizes: Sizes) -> tuple[ParameterShape, ...]:
    """Of the token table and, for gpt, the table of positions."""
    tables = {f"{EMBEDDING}.weight": (sizes.vocab, sizes.hidden)}
    if model.family == "gpt":
        tables["positions.weight"] = (sizes.positions, sizes.hidden)
    return tuple(ParameterShape(name=name, shape=shape) for name, shape in tables.items())


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
    matrices = (ParameterShape(name=f"{name}.weight", shape=shape) for name, shape in linears.items())
    biases = (ParameterShape(name=f"{name}.bias", shape=shape[:1]) for name, shape in linears.items())
    norms = (part for name in ("attention_norm", "mlp_norm") for part in _norm(model, name, hidden))
    return (*matrices, *(biases if is_gpt else ()), *norms)


def head_parameters(model: ModelConfig, sizes: Sizes) -> tuple[ParameterShape, ...]:
    """Of the last norm and the output matrix."""
    head = EMBEDDING if model.tied_embeddings else "head"
    matrix = ParameterShape(name=f"{head}.weight", shape=(sizes.vocab, sizes.hidden))
    return (*_norm(model, "norm", sizes.hidden), matrix)


def _norm(model: ModelConfig, name: str, size: int) -> Iterator[ParameterShape]:
    kinds = ("weight", "bias") if model.family == "gpt" else ("weight",)
    return (ParameterShape(name=f"{name}.{kind}", shape=(size,)) for kind in kinds)
