"""What a decoder-only transformer consists of: parameters, operations and kept activations by layer.

With s = seq_length, h = hidden_size, a = num_heads, q = query width (a * head_dim, by default h), k = key and
value width (num_kv_heads * head_dim), f = ffn_size, V = vocab_size. Everything is whole, for one sample.

Kept for the backward by one layer, in elements, tensor by tensor (fused attention never keeps an s x s
matrix):

    split by tp         queries s*q, key and value 2*s*k, attention output s*q
                        gpt:   s*f into the GELU, s*f out of it
                        llama: gate s*f, silu(gate) s*f, up s*f, their product s*f; and the attention
                               output a second time, s*q: rotary queries lie head by head
                        plain attention: the weights a*s*s, and the attention output only once
                        a window, fused: keys and values once for each query head, 2*s*q
    split, in fp32      log-sum-exp of fused attention a*s
                        norms of queries and keys: their input s*(q + k); on a CPU also normalised
    replicated, fp32    input of each of the two norms 2*s*h
                        llama on a CPU, where RMSNorm is not one kernel: also normalised, 2*s*h
    replicated          with dropout: two masks of one byte an element, 2*s*h bytes
    whole               output of the two norms 2*s*h: sequence parallelism gathers them

Selective recomputation keeps neither what comes out of the norms nor out of the activation functions, nor
the weights of plain attention, and of what goes into the norms the one tensor in the compute format:

    split by tp         gpt: s*f into the GELU; llama: gate and up 2*s*f; attention as above, without a*s*s;
                        s*(q + k) into the norms of queries and keys
    replicated          input of each of the two norms 2*s*h, and the masks
    whole, and fp32     nothing but the log-sum-exp

The norms' statistics, two numbers a token, are left out. A matmul with weights has as many operations
in the gradient of its weights as in its forward; those of attention have no weights.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from launcher.contract.config import ModelConfig
from launcher.contract.model.parameters import embedding_parameters, head_parameters, layer_parameters
from launcher.contract.model.shape import LayerShape, ModelShape, ParameterShape
from launcher.contract.model.sizes import Sizes


def model_shape(
    model: ModelConfig, seq_length: int, *, has_fused_norm: bool, keeps_scores: bool = False
) -> ModelShape:
    """The shape of a GPT or Llama model whose sizes are all known.

    Source of the operations: Narayanan et al. (2021), appendix, with grouped keys and a gated MLP
    added; attention counts the full s x s square, causal or not.
    """
    norm_copies = 2 if model.family == "llama" and not has_fused_norm else 1
    layer = _layer(model, seq_length, norm_copies, keeps_scores=keeps_scores)
    return ModelShape(
        family=model.family,
        layers=(layer,) * _known(model.num_layers),
        prologue=_embedding(model, seq_length),
        epilogue=_head(model, seq_length, norm_copies),
        num_tied_parameters=_known(model.vocab_size) * _known(model.hidden_size)
        if model.tied_embeddings
        else 0,
        num_mask_elements=seq_length**2 if Sizes.of(model, seq_length).window else 0,
    )


def resolve_model(model: ModelConfig) -> ModelConfig:
    """With the default key and value heads and MLP width.

    A model whose hidden size is unknown is returned as it is; `plan.rules.checks` says so.
    """
    if model.family == "custom" or model.hidden_size is None:
        return model
    return replace(
        model,
        num_kv_heads=model.num_heads if model.num_kv_heads is None else model.num_kv_heads,
        ffn_size=4 * model.hidden_size if model.ffn_size is None else model.ffn_size,
    )


def padded_vocabulary(model: ModelConfig, tp: int) -> int | None:
    """The vocabulary rounded up to a multiple of tp; None for a model without one.

    For 250,682 tokens and tp = 8: 250,688.
    """
    if model.vocab_size is None:
        return None
    return -(-model.vocab_size // tp) * tp


def has_sizes(model: ModelConfig) -> bool:
    """Whether the model's shape can be told or measured."""
    if model.family == "custom":
        return model.target is not None
    sizes = (model.num_layers, model.hidden_size, model.num_heads, model.vocab_size)
    return None not in (*sizes, model.num_kv_heads, model.ffn_size)


def train_flops(model: ModelShape, samples: int) -> float:
    """Model FLOPs of one step, forward and backward; recomputation is not counted."""
    return sum(part.forward_flops + backward_flops(part) for part in model.parts) * samples


def backward_flops(part: LayerShape) -> float:
    """Operations of one sample's backward: the gradients of the input and, where they are trained, of the
    weights take as many each as the forward."""
    return 2 * part.forward_flops if part.backward_flops is None else part.backward_flops


def _layer(model: ModelConfig, seq: int, norm_copies: int, *, keeps_scores: bool) -> LayerShape:
    sizes = Sizes.of(model, seq)
    hidden, heads, ffn, queries, keys = sizes.hidden, sizes.num_heads, sizes.ffn, sizes.queries, sizes.keys
    is_gpt = model.family == "gpt"
    num_mlp_matrices, num_kept_mlp = (2, 2) if is_gpt else (3, 4)
    kept_keys = queries if sizes.window and not keeps_scores else keys
    attention = 2 * kept_keys + (2 if is_gpt or keeps_scores else 3) * queries
    scores, log_sums = (heads * seq, 0) if keeps_scores else (0, heads * seq)
    matrices = hidden * (2 * queries + 2 * keys + num_mlp_matrices * ffn)
    normed, norms_of_heads = (queries + keys, 2 * sizes.head) if model.qk_norm else (0, 0)
    matmul_flops = 2.0 * seq * matrices
    layer = LayerShape(
        name="decoder_layer",
        **_counted(layer_parameters(model, sizes)),
        num_region_parameters=norms_of_heads,
        forward_flops=matmul_flops + 4.0 * seq * seq * queries,
        weight_flops=matmul_flops,
        kept_elements=seq * (attention + scores + num_kept_mlp * ffn),
        kept_replicated_bytes=2 * _mask_bytes(model, seq),
        kept_gathered_elements=2 * seq * hidden,
        kept_fp32_elements=log_sums + norm_copies * seq * normed,
        kept_replicated_fp32_elements=2 * norm_copies * seq * hidden,
        output_elements=seq * hidden,
        output_shape=(seq, hidden),
    )
    selective = replace(
        layer,
        kept_elements=seq * (attention + normed + num_kept_mlp // 2 * ffn),
        kept_fp32_elements=log_sums,
        kept_replicated_elements=2 * seq * hidden,
        kept_gathered_elements=0,
        kept_replicated_fp32_elements=0,
        again_flops=4.0 * seq * seq * queries if keeps_scores else 0.0,
    )
    return replace(layer, selective=selective)


def _embedding(model: ModelConfig, seq: int) -> LayerShape:
    """Token and, for gpt, position table. A look-up does no arithmetic and keeps only its dropout mask."""
    sizes = Sizes.of(model, seq)
    hidden = sizes.hidden
    return LayerShape(
        name="embedding",
        **_counted(embedding_parameters(model, sizes)),
        forward_flops=0.0,
        kept_replicated_bytes=_mask_bytes(model, seq),
        output_elements=seq * hidden,
        output_shape=(seq, hidden),
    )


def _head(model: ModelConfig, seq: int, norm_copies: int) -> LayerShape:
    """Final norm, output matrix, loss. Keeps the norm's input and output, and the probabilities."""
    hidden, vocab = _known(model.hidden_size), _known(model.vocab_size)
    matmul_flops = 2.0 * seq * hidden * vocab
    return LayerShape(
        name="head",
        **_counted(head_parameters(model, Sizes.of(model, seq))),
        forward_flops=matmul_flops,
        weight_flops=matmul_flops,
        kept_gathered_elements=seq * hidden,
        kept_fp32_elements=seq * vocab,
        kept_replicated_fp32_elements=norm_copies * seq * hidden,
        output_elements=1,
        output_shape=(),
    )


def _mask_bytes(model: ModelConfig, seq: int) -> int:
    return seq * _known(model.hidden_size) if model.dropout > 0 else 0


def _counted(parameters: tuple[ParameterShape, ...]) -> dict[str, Any]:
    """The fields of a `LayerShape` that follow from its parameters."""
    return {
        "parameters": parameters,
        "num_parameters": sum(prod(each.shape) for each in parameters),
        "num_replicated_parameters": sum(prod(each.shape) for each in parameters if not each.is_split),
    }


def _known(size: int | None) -> int:
    assert size is not None, "the sizes of the model are resolved before its shape is asked for"
    return size
